// What the theme leaves out for those who use a keyboard or a screen reader.
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("pre, div.math, .table-wrapper").forEach((part) => { part.tabIndex = 0; });
  document.querySelectorAll("p.caption[role=heading]").forEach((part) => { part.ariaLevel = "2"; });
});
