"""Presentation of results: HTML, text for terminals, JUnit XML. No module of the domain imports it."""
