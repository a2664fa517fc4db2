// What the theme leaves to the mouse is reached by the keyboard too.

// A table that is wider than its box scrolls in it.
const boxes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
  }
});

// The menu of a narrow page: labels that open it, and its parts. Enter on one that has the focus is a click, by the theme.
const narrow = matchMedia("(max-width: 76.234375em)");
const labels = ".md-header__button[for=__drawer], .md-sidebar--primary :is(.md-nav__title, [for=__toc])";
const setLabels = () => {
  document.querySelectorAll(labels).forEach((label) => (label.tabIndex = narrow.matches ? 0 : -1));
};

narrow.addEventListener("change", setLabels);
document$.subscribe(() => {
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => boxes.observe(box));
  document.querySelector(".md-header__button[for=__drawer]").title = "Menu";
  document.querySelector(".md-search").ariaLabel = "Search";
  setLabels();
});
