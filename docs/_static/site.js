addEventListener("DOMContentLoaded", () => {
  // What the theme leaves out for those who use a keyboard or a screen reader.
  document.querySelectorAll("pre, div.math, .table-wrapper").forEach((part) => { part.tabIndex = 0; });
  document.querySelectorAll("p.caption[role=heading]").forEach((part) => { part.ariaLevel = "2"; });
  // On a phone a formula that is a little too wide is smaller; one that is much too wide scrolls.
  window.MathJax?.startup?.promise.then(() => {
    document.querySelectorAll("div.math").forEach((formula) => {
      const fits = formula.clientWidth / formula.scrollWidth - 0.01;
      if (fits < 0.99) formula.style.fontSize = `${100 * Math.max(fits, 0.65)}%`;
    });
  });
  // Tables for site.css: those of sentences, and those that are wider than the text.
  document.querySelectorAll(".table-wrapper").forEach((wrapper) => {
    const cells = [...wrapper.querySelectorAll("tbody td")];
    const heads = [...wrapper.querySelectorAll("thead th")].map((head) => head.textContent);
    if (cells.some((cell) => cell.textContent.length > 60)) {
      wrapper.firstElementChild.classList.add("sentences");
      cells.forEach((cell) => { if (heads[cell.cellIndex]) cell.dataset.head = heads[cell.cellIndex]; });
      // Columns with more words are wider.
      const words = heads.map((_, k) => cells.filter((cell) => cell.cellIndex === k)
        .reduce((sum, cell) => sum + Math.sqrt(cell.textContent.length), 0));
      const all = words.reduce((a, b) => a + b, 0);
      wrapper.querySelectorAll("thead th").forEach((head, k) => { head.style.width = `${100 * words[k] / all}%`; });
    } else if (wrapper.scrollWidth > wrapper.clientWidth) {
      wrapper.classList.add("wide");
    }
  });
});
addEventListener("load", () => {
  // Pictures of several panels, for site.css.
  document.querySelectorAll(".cell_output img, article p > img").forEach((picture) => {
    if (picture.naturalWidth <= 1000) return;
    picture.parentElement.classList.add("panels");
    picture.parentElement.tabIndex = 0;
  });
});
