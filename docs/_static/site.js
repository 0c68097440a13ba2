addEventListener("DOMContentLoaded", () => {
  // What the theme leaves out for those who use a keyboard or a screen reader.
  document.querySelectorAll("pre, div.math, .table-wrapper").forEach((part) => { part.tabIndex = 0; });
  document.querySelectorAll("p.caption[role=heading]").forEach((part) => { part.ariaLevel = "2"; });
  // Tables for site.css: those of sentences, and those that are wider than the text.
  document.querySelectorAll(".table-wrapper").forEach((wrapper) => {
    const cells = [...wrapper.querySelectorAll("tbody td")];
    const heads = [...wrapper.querySelectorAll("thead th")].map((head) => head.textContent);
    if (cells.some((cell) => cell.textContent.length > 60)) {
      wrapper.firstElementChild.classList.add("sentences");
      cells.forEach((cell) => { cell.dataset.head = heads[cell.cellIndex] || ""; });
    } else if (wrapper.scrollWidth > wrapper.clientWidth) {
      wrapper.classList.add("wide");
    }
  });
});
