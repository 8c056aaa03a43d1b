"""How channels flow through the operators between layers, so that scales on them can cancel."""
