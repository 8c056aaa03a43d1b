/* Code and tables that scroll can be reached and scrolled with the keyboard. The theme wraps tables by a script too. */
(() => {
  function mark() {
    for (const box of document.querySelectorAll(".md-content pre > code, .md-typeset__scrollwrap")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  }
  addEventListener("load", () => requestAnimationFrame(mark));
  addEventListener("resize", mark);
})();
