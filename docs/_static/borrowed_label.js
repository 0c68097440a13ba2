// The front picture, alive: two sliders, a draw, and how often two labels agree in closed form.
// Without JavaScript the page keeps the picture.
addEventListener("DOMContentLoaded", () => {
  const picture = document.querySelector('img[src*="borrowed_label"]');
  if (!picture) return;
  const PLACES = [[50, 60], [130, 150], [260, 75], [220, 240], [360, 200]];
  const EDGES = [[0, 1], [1, 2], [2, 3], [3, 4], [1, 3]];
  const NODES = [0, 1, 2, 3, 4];
  const COLORS = ["#0072b2", "#e69f00"];
  const rows = NODES.map((i) => [i, ...EDGES.filter((e) => e.includes(i)).map(([a, b]) => a + b - i)]);
  let seed = 9;

  // Uniform numbers of a seed (mulberry32), so that moving a slider keeps the draw's randomness.
  const uniforms = (state) => () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  // Logarithm of a Gamma variate (Marsaglia and Tsang 2000): small shapes underflow otherwise.
  const logGamma = (shape, uniform) => {
    const d = shape + 1 - 1 / 3;
    for (;;) {
      const normal = Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
      const v = (1 + normal / Math.sqrt(9 * d)) ** 3, u = 1 - uniform();
      if (v > 0 && Math.log(u) < normal ** 2 / 2 + d - d * v + d * Math.log(v)) {
        return Math.log(d * v) + Math.log(1 - uniform()) / shape;
      }
    }
  };
  // L: probabilities of a node's choices. The log odds are of the node itself against a neighbour.
  const attention = (i, own) => {
    const weights = rows[i].map((j) => (j === i ? Math.exp(own) : 1));
    const total = weights.reduce((a, b) => a + b);
    return weights.map((w) => w / total);
  };
  // Same source: E[z_0^2 + z_1^2] of a Dirichlet(alpha, alpha). Other sources: independent dice.
  const agreement = (i, j, alpha, own) => {
    const [a, b] = [attention(i, own), attention(j, own)];
    const common = rows[i].reduce((sum, k, at) => sum + a[at] * (b[rows[j].indexOf(k)] ?? 0), 0);
    return common * (alpha + 1) / (2 * alpha + 1) + (1 - common) / 2;
  };

  const arc = (x, y, radius, from, to, color, width) => {
    if (to - from > 0.9999) return `<circle cx="${x}" cy="${y}" r="${radius}" fill="none" stroke="${color}" stroke-width="${width}"/>`;
    const at = (turn) => [x + radius * Math.sin(2 * Math.PI * turn), y - radius * Math.cos(2 * Math.PI * turn)].join(" ");
    return `<path d="M ${at(from)} A ${radius} ${radius} 0 ${to - from > 0.5 ? 1 : 0} 1 ${at(to)}" fill="none" stroke="${color}" stroke-width="${width}"/>`;
  };
  const arrow = (i, j) => {
    const [[x, y], [u, v]] = [PLACES[i], PLACES[j]], far = Math.hypot(u - x, v - y);
    const [dx, dy] = [(u - x) / far, (v - y) / far], [r, bend] = [33, 0.18 * far];
    return `<path d="M ${x + r * dx - 6 * dy} ${y + r * dy + 6 * dx} Q ${(x + u) / 2 - bend * dy} ${(y + v) / 2 + bend * dx} ${u - r * dx - 6 * dy} ${v - r * dy + 6 * dx}" fill="none" stroke="currentColor" stroke-width="2.5" marker-end="url(#borrowed-tip)"/>`;
  };

  const part = document.createElement("div");
  part.className = "borrowed-label";
  part.innerHTML = `
    <svg viewBox="0 0 410 290" role="img"><title></title><g></g></svg>
    <table><caption>How often two labels agree (.50: independent)</caption><tbody></tbody></table>
    <div class="controls">
      <label>Concentration <code>alpha</code> of each label <output></output>
        <input type="range" min="-1.7" max="1" step="0.05" value="-0.9"></label>
      <label>Log odds of a node's choice of itself <output></output>
        <input type="range" min="-5" max="5" step="0.25" value="0"></label>
      <button type="button">Draw again</button>
      <p>Inner ring: the node's die. Arrow: whose die it rolls (no arrow: its own). Outer ring: its label.</p>
    </div>`;
  const [alphaSlider, ownSlider] = part.querySelectorAll("input");
  const [alphaText, ownText] = part.querySelectorAll("output");

  const show = () => {
    const alpha = 10 ** alphaSlider.value, own = Number(ownSlider.value), uniform = uniforms(seed);
    const first = NODES.map(() => 1 / (1 + Math.exp(logGamma(alpha, uniform) - logGamma(alpha, uniform))));
    const source = NODES.map((i) => {
      let rest = uniform();
      return rows[i][attention(i, own).findIndex((p) => (rest -= p) < 0)] ?? i;
    });
    const label = NODES.map((i) => (uniform() < first[source[i]] ? 0 : 1));
    const lines = EDGES.map(([a, b]) => `<path d="M ${PLACES[a].join(" ")} L ${PLACES[b].join(" ")}" stroke="#888" stroke-opacity="0.4" stroke-width="5"/>`);
    const nodes = NODES.map((i) => {
      const [x, y] = PLACES[i];
      return `<circle cx="${x}" cy="${y}" r="30" fill="var(--color-background-primary)"/>`
        + arc(x, y, 28, 0, 1, COLORS[label[i]], 4) + arc(x, y, 18, 0, first[i], COLORS[0], 10)
        + arc(x, y, 18, first[i], 1, COLORS[1], 10)
        + `<text x="${x}" y="${y + 5}" text-anchor="middle" fill="currentColor" font-size="14">${i}</text>`;
    });
    const tip = '<defs><marker id="borrowed-tip" viewBox="0 0 10 10" refX="7" refY="5" markerWidth="5" markerHeight="5" orient="auto"><path d="M 0 0 L 10 5 L 0 10 z" fill="currentColor"/></marker></defs>';
    const arrows = NODES.filter((i) => source[i] !== i).map((i) => arrow(i, source[i]));
    part.querySelector("g").innerHTML = [tip, ...lines, ...nodes, ...arrows].join("");
    part.querySelector("title").textContent = NODES.map((i) => `Node ${i} rolls the die of node ${source[i]}: label ${label[i]}.`).join(" ");
    part.querySelector("tbody").innerHTML = NODES.map((i) => `<tr><th scope="row">${i}</th>${NODES.map((j) => {
      const p = agreement(i, j, alpha, own);
      return i === j ? "<td></td>" : `<td style="background: rgb(0 158 115 / ${Math.round(300 * (p - 0.5))}%)">${p.toFixed(2).replace("0.", ".")}</td>`;
    }).join("")}</tr>`).join("") + `<tr><td></td>${NODES.map((j) => `<th scope="col">${j}</th>`).join("")}</tr>`;
    alphaText.textContent = alpha.toPrecision(2);
    ownText.textContent = own.toFixed(2);
  };
  part.addEventListener("input", show);
  part.querySelector("button").addEventListener("click", () => { seed += 1; show(); });
  show();
  picture.closest("p").replaceWith(part);
});
