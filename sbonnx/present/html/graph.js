"use strict";
// Draws the graph of a model: nested blocks, whose layout is computed when they are opened.
(function () {
  const BOX = { width: 172, height: 48 };
  const PORT = { width: 132, height: 24 };
  const HEAD = 30; // height of the title of an opened block
  const SHOWN = 40; // boxes that are opened at first
  const LISTED = 60; // results of a search that are listed
  const ZOOM = { least: 0.2, most: 2, step: 1.25, readable: 0.6 };
  const BITS = [["bits4", "up to 4 bits"], ["bits8", "8 bits"], ["bits16", "16 bits"], ["fp8", "8-bit float"], ["float", "float"], ["other", "no floats"]];
  const STATES = { "": "all nodes", quantized: "quantized", float: "float", refused: "with a reason", other: "no floats" };

  function add(parent, tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }

  function draw(parent, tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (parent) parent.append(element);
    return element;
  }

  function button(parent, className, text, action) {
    const element = add(parent, "button", className, text);
    element.type = "button";
    element.addEventListener("click", action);
    return element;
  }

  // The accessible name begins with the visible text (WCAG 2.5.3), so that voice commands find the button.
  function describe(element, more) {
    element.setAttribute("aria-label", element.textContent + " " + more);
  }

  function count(number, noun) { return number + " " + noun + (number === 1 ? "" : "s"); }
  function short(name) { return name.split("/").slice(-2).join("/"); }
  function decibel(value) { return value.toFixed(1).replace("-", "\u2212") + " dB"; }

  // --- model: entities are nodes, blocks, and inputs and outputs of the model -------------------------

  class Model {
    constructor(data) {
      this.data = data;
      this.root = { isBlock: true, isOpen: true, title: "graph", up: null, depth: 0, children: [], first: -1 };
      this.blocks = [];
      for (const [title, parent] of data.blocks) this.blocks.push(this.child(parent, { isBlock: true, isOpen: false, title: short(title), children: [] }));
      this.makers = data.tensors.map(() => null);
      this.readers = data.tensors.map(() => []);
      this.nodes = data.nodes.map((node, index) => this.child(node.block, { ...node, title: short(node.name), why: node.why.map((reason) => data.reasons[reason]), index, first: index }));
      for (const node of this.nodes) {
        for (const tensor of node.out) this.makers[tensor] = node;
        for (const tensor of new Set(node.in || [])) this.readers[tensor].push(node);
      }
      this.outside = [];
      for (const tensor of data.inputs) if (!this.makers[tensor]) this.makers[tensor] = this.terminal(tensor, "input");
      for (const tensor of data.outputs) this.readers[tensor].push(this.terminal(tensor, "output"));
      this.root.edges = [];
      this.readers.forEach((readers, tensor) => {
        const maker = this.makers[tensor];
        if (maker) for (const reader of readers) this.root.edges.push([maker, reader, tensor]);
      });
      for (const node of this.nodes) this.categorize(node);
      for (const block of [this.root, ...this.blocks].reverse()) this.summarize(block);
      this.openFirst();
    }

    child(parent, entity) {
      entity.up = parent < 0 ? this.root : this.blocks[parent];
      entity.depth = entity.up.depth + 1;
      entity.up.children.push(entity);
      return entity;
    }

    terminal(tensor, role) {
      const entity = { terminal: role, tensor, title: this.data.tensors[tensor][0], depth: 0, up: null };
      this.outside.push(entity);
      return entity;
    }

    // Nodes that run in the kernel of the one before have its category.
    categorize(node) {
      const reads = (node.reads || []).filter((read) => read.role !== "bias");
      if (reads.length) {
        const bits = Math.min(...reads.map((read) => read.bits));
        node.category = reads.some((read) => read.type.startsWith("f")) ? "fp8" : bits <= 4 ? "bits4" : bits <= 8 ? "bits8" : "bits16";
      } else if (node.kind === "quantized") {
        const maker = node.in && this.makers[node.in[0]];
        node.category = (maker && maker.category) || "bits8";
      } else node.category = node.kind;
    }

    summarize(block) {
      block.total = 0;
      block.refused = 0;
      block.categories = {};
      for (const child of block.children) {
        block.total += child.isBlock ? child.total : 1;
        block.refused += child.isBlock ? child.refused : child.why.length ? 1 : 0;
        const categories = child.isBlock ? child.categories : { [child.category]: 1 };
        for (const [name, times] of Object.entries(categories)) block.categories[name] = (block.categories[name] || 0) + times;
        if (child.db !== undefined && !(child.db >= block.db)) block.db = child.db;
        if (block.first === undefined || child.first < block.first) block.first = child.first;
      }
      block.children.sort((a, b) => a.first - b.first);
    }

    // Open whole levels as long as few boxes are visible.
    openFirst() {
      let visible = this.root.children.length, closed = this.root.children.filter((child) => child.isBlock);
      for (;;) {
        const inner = closed.flatMap((block) => block.children);
        visible += inner.length - closed.length;
        if (!closed.length || visible > SHOWN) return;
        for (const block of closed) block.isOpen = true;
        closed = inner.filter((child) => child.isBlock);
      }
    }

    under(block) {
      const found = [], stack = [block];
      while (stack.length) {
        const entity = stack.pop();
        if (entity.isBlock) stack.push(...entity.children); else found.push(entity);
      }
      return found.sort((a, b) => a.index - b.index);
    }
  }

  // The child of a block that contains an entity, or null.
  function childOf(block, entity) {
    while (entity.depth > block.depth + 1) entity = entity.up;
    return entity.up === block ? entity : null;
  }

  // Edges that begin or end in a block: [maker, reader, tensor].
  function edgesOf(block) {
    if (!block.edges) block.edges = edgesOf(block.up).filter(([maker, reader]) => childOf(block, maker) || childOf(block, reader));
    return block.edges;
  }

  // Nodes and edges of one level. What is outside is drawn as ports, one for all that connect to the same children.
  function connect(block) {
    const edges = new Map(), outside = new Map();
    for (const [maker, reader, tensor] of edgesOf(block)) {
      const from = childOf(block, maker), to = childOf(block, reader);
      if (from && to) {
        if (from !== to) join(edges, from, to, tensor);
      } else {
        const key = from ? reader : maker;
        if (!outside.has(key)) outside.set(key, { inner: new Set(), incoming: !from, tensors: new Set() });
        outside.get(key).inner.add(from || to);
        outside.get(key).tensors.add(tensor);
      }
    }
    const ports = new Map();
    for (const [entity, { inner, incoming, tensors }] of outside) {
      const key = incoming + [...inner].map((child) => child.first + (child.isBlock ? "b" : "")).sort().join();
      if (!ports.has(key)) ports.set(key, { isPort: true, incoming, inner, entities: [], tensors: new Set() });
      ports.get(key).entities.push(entity);
      for (const tensor of tensors) ports.get(key).tensors.add(tensor);
    }
    for (const port of ports.values()) {
      for (const child of port.inner) for (const tensor of port.tensors) join(edges, ...(port.incoming ? [port, child] : [child, port]), tensor);
    }
    return { ports: [...ports.values()], edges: [...edges.values()].flatMap((targets) => [...targets.values()]) };
  }

  function join(edges, from, to, tensor) {
    if (!edges.has(from)) edges.set(from, new Map());
    if (!edges.get(from).has(to)) edges.get(from).set(to, { from, to, tensors: new Set() });
    edges.get(from).get(to).tensors.add(tensor);
  }

  // Positions of the children of an opened block, relative to its corner.
  function layoutOf(block) {
    if (block.layout) return block.layout;
    const { ports, edges } = connect(block);
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ nodesep: 20, ranksep: 30, marginx: 14, marginy: 12 });
    graph.setDefaultEdgeLabel(() => ({}));
    const items = [...block.children, ...ports];
    const names = new Map(items.map((item, index) => [item, String(index)]));
    for (const item of items) {
      const inner = item.isBlock && item.isOpen ? layoutOf(item) : null;
      graph.setNode(names.get(item), inner ? { width: inner.width, height: inner.height + HEAD } : { ...(item.isPort ? PORT : BOX) });
    }
    for (const edge of edges) graph.setEdge(names.get(edge.from), names.get(edge.to));
    dagre.layout(graph);
    const at = (item) => {
      const { x, y, width, height } = graph.node(names.get(item));
      return { item, x: x - width / 2, y: y - height / 2, width, height };
    };
    const { width, height } = graph.graph();
    block.layout = {
      width: Math.max(width, BOX.width + 28),
      height,
      places: items.map(at),
      edges: edges.map((edge) => ({ ...edge, points: graph.edge(names.get(edge.from), names.get(edge.to)).points })),
    };
    return block.layout;
  }

  function curve(points, x, y) {
    const at = points.map((point) => [(point.x + x).toFixed(1), (point.y + y).toFixed(1)]);
    let path = "M" + at[0];
    for (let index = 1; index < at.length - 1; index += 1) {
      const [one, two] = [points[index], points[index + 1]];
      const end = index === at.length - 2 ? at[index + 1] : [((one.x + two.x) / 2 + x).toFixed(1), ((one.y + two.y) / 2 + y).toFixed(1)];
      path += "Q" + at[index] + " " + end;
    }
    return at.length === 2 ? path + "L" + at[1] : path;
  }

  // The head of an arrow at the end of a line.
  function arrow(points, x, y) {
    const [before, end] = points.slice(-2), length = Math.hypot(end.x - before.x, end.y - before.y) || 1;
    const [right, down] = [(end.x - before.x) / length, (end.y - before.y) / length];
    const corner = (side) => (end.x + x - 7 * right + 4 * side * down).toFixed(1) + " " + (end.y + y - 7 * down - 4 * side * right).toFixed(1);
    return "M" + corner(1) + "L" + (end.x + x).toFixed(1) + " " + (end.y + y).toFixed(1) + "L" + corner(-1);
  }

  // --- view -------------------------------------------------------------------------------------------

  class View {
    constructor(root) {
      this.model = new Model(JSON.parse(root.querySelector("script").textContent));
      this.zoom = 1;
      this.matches = null;
      this.mode = this.model.root.db === undefined ? "bits" : "loss";
      this.tools(add(root, "div", "tools"));
      this.results = add(root, "ol", "results");
      this.results.hidden = true;
      this.legend = add(root, "p", "legend");
      const halves = add(root, "div", "halves");
      this.canvas = add(halves, "div", "canvas");
      this.canvas.setAttribute("role", "group");
      this.canvas.setAttribute("aria-label", "Graph of the model; arrow keys move between boxes");
      this.sizer = add(this.canvas, "div", "sizer");
      this.plane = add(this.sizer, "div", "plane");
      this.panel = add(halves, "section", "panel");
      this.panel.setAttribute("aria-label", "Details");
      this.panel.tabIndex = 0;
      this.navigation();
      this.render();
      this.fit();
      this.select(this.model.root);
    }

    tools(bar) {
      const { nodes } = this.model;
      const search = add(bar, "input");
      search.type = "search";
      search.placeholder = "Search nodes and tensors";
      search.setAttribute("aria-label", "Search nodes and tensors");
      const times = new Map();
      for (const node of nodes) times.set(node.op, (times.get(node.op) || 0) + 1);
      const operators = [...times].sort((a, b) => b[1] - a[1]).map(([op, number]) => [op, op + " (" + number + ")"]);
      const op = this.choice(bar, "Operator", [["", "all operators"], ...operators]);
      const state = this.choice(bar, "State", Object.entries(STATES));
      const colour = this.choice(bar, "Colour", this.mode === "loss" ? [["loss", "colour: loss"], ["bits", "colour: bits"]] : [["bits", "colour: bits"]]);
      const apply = () => this.filter(search.value, op.value, state.value);
      for (const control of [search, op, state]) control.addEventListener("input", apply);
      search.addEventListener("keydown", (event) => { if (event.key === "Enter" && this.listed.length) this.reveal(this.listed[0]); });
      colour.addEventListener("input", () => { this.mode = colour.value; this.render(); });
      const press = (label, name, action) => button(bar, "", label, action).setAttribute("aria-label", name);
      press("+", "zoom in", () => this.scale(this.zoom * ZOOM.step));
      press("\u2212", "zoom out", () => this.scale(this.zoom / ZOOM.step));
      press("fit", "fit the graph into the window", () => this.scale(this.fitting(ZOOM.least)));
      press("collapse", "collapse all blocks", () => this.openAll(false));
      if (nodes.length <= 400) press("expand", "expand all blocks", () => this.openAll(true));
      this.found = add(bar, "output");
    }

    choice(bar, name, values) {
      const select = add(bar, "select");
      select.setAttribute("aria-label", name);
      for (const [value, label] of values) add(select, "option", "", label).value = value;
      return select;
    }

    openAll(open) {
      for (const block of this.model.blocks) { block.isOpen = open; block.layout = null; }
      this.model.root.layout = null;
      this.render();
    }

    filter(words, op, state) {
      const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
      const isActive = wanted.length || op || state;
      const names = this.model.data.tensors;
      const text = (node) => [node.name, node.op, node.module || "", ...node.out.map((tensor) => names[tensor][0]), ...(node.reads || []).map((read) => read.tensor)].join(" ").toLowerCase();
      const fits = (node) => (!op || node.op === op) && (!state || (state === "refused" ? node.why.length : node.kind === state)) && (!wanted.length || wanted.every((word) => text(node).includes(word)));
      this.listed = isActive ? this.model.nodes.filter(fits) : [];
      this.matches = isActive ? new Map() : null;
      for (const node of this.listed) for (let entity = node; entity; entity = entity.up) this.matches.set(entity, (this.matches.get(entity) || 0) + 1);
      this.found.textContent = isActive ? this.listed.length + " of " + count(this.model.nodes.length, "node") : "";
      this.results.replaceChildren();
      this.results.hidden = !this.listed.length;
      for (const node of this.listed.slice(0, LISTED)) this.link(add(this.results, "li"), node);
      if (this.listed.length > LISTED) add(this.results, "li", "soft", "and " + (this.listed.length - LISTED) + " more");
      this.render();
    }

    // A button that shows an entity.
    link(parent, entity) {
      const text = entity.terminal ? entity.terminal + " " : (entity.isBlock ? "block" : entity.op) + " ";
      const made = button(parent, "link", "", () => this.reveal(entity));
      add(made, "span", "op", text);
      add(made, "span", "mono", entity.isBlock ? entity.title : entity.name || entity.title);
      return made;
    }

    reveal(entity) {
      for (let block = entity.up; block; block = block.up) { block.isOpen = true; block.layout = null; }
      this.render();
      this.select(entity.terminal ? { tensors: [entity.tensor] } : entity);
      const element = this.elements.get(entity);
      if (!element) return;
      const [box, frame] = [element.getBoundingClientRect(), this.canvas.getBoundingClientRect()];
      this.canvas.scrollBy(box.left - frame.left - (frame.width - box.width) / 2, box.top - frame.top - frame.height / 3);
      element.focus({ preventScroll: true });
    }

    toggle(block) {
      const before = this.elements.get(block).getBoundingClientRect();
      block.isOpen = !block.isOpen;
      for (let one = block; one; one = one.up) one.layout = null;
      this.render();
      const element = this.elements.get(block), after = element.getBoundingClientRect();
      this.canvas.scrollBy(after.left + after.width / 2 - before.left - before.width / 2, after.top - before.top);
      element.focus({ preventScroll: true });
      this.select(block);
    }

    // --- drawing

    render() {
      const layout = layoutOf(this.model.root);
      this.elements = new Map();
      this.curves = [];
      this.plane.replaceChildren();
      this.lines = draw(null, "svg", { width: layout.width, height: layout.height, "aria-hidden": "true" });
      this.boxes = document.createDocumentFragment();
      this.place(layout, 0, 0);
      this.plane.append(this.lines, this.boxes);
      this.size = layout;
      this.scale(this.zoom);
      this.explainColours();
      this.mark();
    }

    place(layout, x, y) {
      for (const { item, x: left, y: top, width, height } of layout.places) {
        const isFrame = item.isBlock && item.isOpen;
        if (isFrame) {
          const frame = add(this.plane, "div", "frame");
          this.position(frame, x + left, y + top, width, height);
        }
        const element = isFrame ? this.header(item) : item.isPort ? this.port(item) : this.box(item);
        this.position(element, x + left, y + top, width, isFrame ? HEAD : height);
        this.boxes.append(element);
        if (!item.isPort) this.elements.set(item, element);
        if (isFrame) this.place(item.layout, x + left + (width - item.layout.width) / 2, y + top + HEAD);
      }
      for (const edge of layout.edges) {
        const path = curve(edge.points, x, y);
        const line = draw(this.lines, "path", { class: "edge", d: path + arrow(edge.points, x, y) });
        draw(this.lines, "path", { class: "hit", d: path }).addEventListener("click", () => this.select({ tensors: [...edge.tensors], line }));
        this.curves.push([edge, line]);
      }
    }

    position(element, left, top, width, height) {
      Object.assign(element.style, { left: left + "px", top: top + "px", width: width + "px", height: height + "px" });
    }

    header(block) {
      const element = button(null, "head " + this.colour(block), "", () => this.toggle(block));
      add(element, "span", "op", "\u2212 " + block.title);
      element.setAttribute("aria-expanded", "true");
      describe(element, "opened block, " + count(block.total, "node"));
      element.title = block.title;
      return element;
    }

    port(port) {
      const names = port.entities.map((entity) => entity.name || entity.title);
      const isTerminal = port.entities.every((entity) => entity.terminal);
      const element = button(null, "port" + (isTerminal ? " terminal" : ""), "", () => (port.entities.length === 1 ? this.reveal(port.entities[0]) : this.select({ tensors: [...port.tensors] })));
      element.textContent = (port.incoming ? "" : "\u2192 ") + short(names[0]) + (names.length > 1 ? " +" + (names.length - 1) : "");
      element.title = names.slice(0, 20).join("\n");
      describe(element, (port.incoming ? "from " : "to ") + names[0] + (names.length > 1 ? " and " + (names.length - 1) + " more" : ""));
      return element;
    }

    box(item) {
      const element = button(null, (item.isBlock ? "box block " : "box ") + this.colour(item), "", () => (item.isBlock ? this.toggle(item) : this.select(item)));
      const first = add(element, "span", "row");
      add(first, "span", "op", item.isBlock ? "+ " + item.title : item.op);
      const matches = this.matches && item.isBlock ? this.matches.get(item) : 0;
      const figure = matches ? count(matches, "hit") : item.db === undefined ? "" : (item.isBlock ? "\u2265 " : "") + decibel(item.db);
      first.append(" ");
      if (figure) add(first, "span", "figure", figure);
      else if (!item.isBlock && item.why.length && item.kind === "float") add(first, "span", "figure reason", "why");
      element.append(" ");
      add(element, "span", "name", item.isBlock ? count(item.total, "node") + (item.categories.float ? ", " + item.categories.float + " float" : "") : item.title);
      if (item.isBlock) {
        element.setAttribute("aria-expanded", "false");
        this.shares(add(element, "span", "shares"), item);
      }
      if (this.matches && !this.matches.has(item)) element.classList.add("faint");
      element.title = item.isBlock ? item.title : item.name;
      describe(element, item.isBlock ? "closed block" : item.name + ", " + BITS.find(([kind]) => kind === item.category)[1]);
      return element;
    }

    shares(bar, block) {
      for (const [kind] of BITS) if (block.categories[kind]) add(bar, "span", kind).style.flexGrow = block.categories[kind];
    }

    shade(value) { return "shade" + this.model.data.shades.filter((limit) => value >= limit).length; }

    colour(item) {
      if (this.mode === "loss") return item.db !== undefined ? this.shade(item.db) : ["float", "other"].includes(item.category) ? item.category : "";
      return item.isBlock ? "" : item.category;
    }

    explainColours() {
      this.legend.replaceChildren();
      const key = (className, text) => add(this.legend, "span", "step " + className, text);
      if (this.mode === "loss") {
        const limits = this.model.data.shades;
        add(this.legend, "span", "", "isolated SQNR of a layer:");
        ["below " + limits[0], ...limits].forEach((limit, index) => key("shade" + index, limit + (index === limits.length ? " and more dB" : "")));
      }
      for (const [kind, text] of BITS) if (this.model.root.categories[kind] && (this.mode === "bits" || kind === "float")) key("key-" + kind + " " + kind, text);
    }

    // --- selection and details

    select(target) {
      this.selected = target;
      this.mark();
      this.panel.replaceChildren();
      if (target.tensors) for (const tensor of target.tensors.slice(0, 20)) this.tensor(tensor);
      else if (target.isBlock) this.block(target);
      else this.node(target);
      this.panel.scrollTop = 0;
      if (target !== this.model.root && matchMedia("(max-width: 900px)").matches) this.panel.scrollIntoView({ block: "nearest" });
    }

    mark() {
      for (const [item, element] of this.elements) element.toggleAttribute("data-selected", item === this.selected);
      const tensors = this.selected && this.selected.tensors;
      for (const [edge, line] of this.curves) {
        line.classList.toggle("near", edge.from === this.selected || edge.to === this.selected || (!!tensors && tensors.some((tensor) => edge.tensors.has(tensor))));
      }
      const boxes = [...this.elements.values()];
      const chosen = this.elements.get(this.selected) || boxes[0];
      for (const element of boxes) element.tabIndex = element === chosen ? 0 : -1;
    }

    title(kind, name) {
      const head = add(this.panel, "h3", "", kind + " ");
      add(head, "span", "mono", name);
    }

    fields(rows) {
      const list = add(this.panel, "dl");
      for (const [name, value] of rows) if (value) { add(list, "dt", "", name); add(list, "dd", "", value); }
    }

    links(title, entities) {
      if (!entities.length) return;
      add(this.panel, "h4", "", title);
      const list = add(this.panel, "ul", "links");
      for (const entity of entities.slice(0, LISTED)) this.link(add(list, "li"), entity);
      if (entities.length > LISTED) add(list, "li", "soft", "and " + (entities.length - LISTED) + " more");
    }

    reasons(node) {
      for (const [why, code] of node.why) {
        const line = add(this.panel, "p", node.kind === "float" ? "refusal" : "soft", why);
        if (code) add(line, "small", "inline", " " + code);
      }
    }

    node(node) {
      const { tensors } = this.model.data;
      this.title(node.op, node.name);
      this.reasons(node);
      this.fields([
        ["module", node.module],
        ["state", BITS.find(([kind]) => kind === node.category)[1]],
        ...node.out.map((tensor) => ["output", tensors[tensor][1]]),
        ...(node.loss || []),
      ]);
      for (const read of node.reads || []) this.read(read);
      this.connections("Reads", node.in || [], (tensor) => [this.model.makers[tensor]].filter(Boolean));
      this.connections("Read by", node.out, (tensor) => this.model.readers[tensor]);
    }

    connections(title, tensors, others) {
      if (!tensors.length) return;
      add(this.panel, "h4", "", title);
      const list = add(this.panel, "ul", "links");
      for (const tensor of new Set(tensors)) {
        const line = add(list, "li"), [name, type] = this.model.data.tensors[tensor];
        button(line, "link mono", name, () => this.select({ tensors: [tensor] }));
        if (type) add(line, "span", "soft", " " + type + " ");
        for (const entity of others(tensor).slice(0, LISTED)) if (!entity.terminal) this.link(line, entity);
      }
    }

    read(read) {
      add(this.panel, "h4", "", read.role);
      this.fields([["tensor", read.tensor], ["type", read.type], ["scale", read.scale], ["range", read.range]]);
      const chart = this.model.data.histograms[read.role + " " + read.tensor];
      if (chart) this.histogram(chart);
    }

    histogram(chart) {
      const figure = add(this.panel, "figure");
      const plot = draw(figure, "svg", { class: "plot", width: "100%", height: chart.height, viewBox: "0 0 100 " + chart.height, preserveAspectRatio: "none", role: "img", "aria-label": "Histogram: " + chart.sentence });
      draw(plot, "rect", { class: "covered", x: chart.covered[0], width: chart.covered[1] - chart.covered[0], height: chart.height });
      draw(plot, "path", { class: "bin", d: chart.bars });
      if (chart.levels) draw(plot, "path", { class: "level", d: chart.levels });
      for (const end of chart.covered) draw(plot, "path", { class: "limit", d: "M" + end + " 0V" + chart.height });
      const marks = draw(figure, "svg", { class: "marks", width: "100%", height: 16, "aria-hidden": "true" });
      for (const mark of chart.marks) draw(marks, "text", { x: mark.at + "%", y: 12, "text-anchor": mark.anchor }).textContent = mark.label;
      add(figure, "p", "soft", chart.sentence);
    }

    tensor(tensor) {
      const [name, type] = this.model.data.tensors[tensor], readers = this.model.readers[tensor];
      this.title("Tensor", name);
      this.fields([["type", type]]);
      const reads = new Map(readers.flatMap((node) => node.reads || []).filter((read) => read.tensor === name).map((read) => [JSON.stringify(read), read]));
      for (const read of reads.values()) this.read(read);
      if (!reads.size) add(this.panel, "p", "soft", "not quantized");
      this.links("Computed by", [this.model.makers[tensor]].filter((entity) => entity && !entity.terminal));
      this.links("Read by", readers.filter((entity) => !entity.terminal));
    }

    block(block) {
      const nodes = this.model.under(block), isRoot = block === this.model.root;
      this.title(isRoot ? "Graph" : "Block", isRoot ? "" : block.title);
      const part = BITS.filter(([kind]) => block.categories[kind]).map(([kind, text]) => [text, count(block.categories[kind], "node")]);
      this.fields([["nodes", String(block.total)], ...part]);
      const worst = nodes.filter((node) => node.db !== undefined).sort((a, b) => a.db - b.db).slice(0, 5);
      this.links("Largest losses", worst);
      const reasons = new Map();
      for (const node of nodes) if (node.kind === "float") for (const [why, code] of node.why) reasons.set(code || why, [...(reasons.get(code || why) || []), node]);
      for (const [code, refused] of reasons) this.links("Float: " + code + " (" + refused.length + ")", refused.slice(0, 3));
      if (isRoot) add(this.panel, "p", "soft", "Click a block to open it, a node or line for its details.");
    }

    // --- moving

    fitting(least) {
      const room = this.canvas.clientWidth / this.size.width;
      return Math.min(1, Math.max(least, room));
    }

    fit() {
      this.scale(this.fitting(ZOOM.readable));
      this.canvas.scrollLeft = (this.canvas.scrollWidth - this.canvas.clientWidth) / 2;
    }

    scale(zoom) {
      const { scrollLeft, scrollTop, clientWidth, clientHeight } = this.canvas, before = this.zoom;
      this.zoom = Math.min(ZOOM.most, Math.max(ZOOM.least, zoom));
      Object.assign(this.plane.style, { width: this.size.width + "px", height: this.size.height + "px", transform: "scale(" + this.zoom + ")" });
      Object.assign(this.sizer.style, { width: this.size.width * this.zoom + "px", height: this.size.height * this.zoom + "px" });
      const ratio = this.zoom / before;
      if (ratio !== 1) this.canvas.scrollTo((scrollLeft + clientWidth / 2) * ratio - clientWidth / 2, (scrollTop + clientHeight / 2) * ratio - clientHeight / 2);
    }

    navigation() {
      this.canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        this.scale(this.zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
      }, { passive: false });
      this.canvas.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "mouse" || event.button || event.target.closest("button, .hit")) return;
        this.canvas.setPointerCapture(event.pointerId);
        const move = (moved) => this.canvas.scrollBy(-moved.movementX, -moved.movementY);
        this.canvas.addEventListener("pointermove", move);
        this.canvas.addEventListener("pointerup", () => this.canvas.removeEventListener("pointermove", move), { once: true });
      });
      this.canvas.addEventListener("keydown", (event) => {
        const way = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowRight: [1, 0], ArrowLeft: [-1, 0] }[event.key];
        const from = document.activeElement;
        if (!way || !from.matches(".box, .head")) return;
        event.preventDefault();
        const next = this.nearest(from, way);
        if (!next) return;
        from.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      });
    }

    // The box nearest to another one in a direction; sideways distance counts more.
    nearest(from, [right, down]) {
      const middle = (element) => { const box = element.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; };
      const [x, y] = middle(from);
      let best = null, least = Infinity;
      for (const element of this.elements.values()) {
        const [toX, toY] = middle(element), along = (toX - x) * right + (toY - y) * down;
        const distance = along + 3 * Math.abs((toX - x) * down + (toY - y) * right);
        if (along > 2 && distance < least) { least = distance; best = element; }
      }
      return best;
    }
  }

  document.querySelectorAll(".graph").forEach((root) => {
    const folded = root.closest("details:not([open])");
    const start = () => new View(root);
    if (folded) folded.addEventListener("toggle", start, { once: true }); else start();
  });
})();
