// Values under the pointer, read back from the shapes: a plot says what its axes span.
{
  const axis = text => {
    const [kind, ...rest] = text.split(' '), [low, high, from, to] = rest.map(Number);
    return at => {
      const fraction = (at - from) / (to - from);
      return kind == 'log' ? low * Math.pow(high / low, fraction) : low + fraction * (high - low);
    };
  };
  const short = value => value == 0 || Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6
    ? String(+value.toPrecision(4)) : value.toExponential(2);
  const tip = document.createElement('div');
  tip.id = 'tip';
  tip.hidden = true;
  document.body.append(tip);
  let rule;
  const leave = () => { tip.hidden = true; rule?.remove(); };
  const coordinates = group => [
    ...[...group.querySelectorAll('polyline')].flatMap(line => [...line.points].map(p => [p.x, p.y])),
    ...[...group.querySelectorAll('circle')].map(c => [c.cx.baseVal.value, c.cy.baseVal.value])];
  document.addEventListener('pointermove', event => {
    const svg = event.target.closest?.('svg'), plot = svg?.querySelector('.plot');
    if (!plot) return leave();
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
    const ends = plot.dataset.x.split(' ').slice(3).map(Number), x = axis(plot.dataset.x), y = axis(plot.dataset.y);
    if (at.x < ends[0] - 4 || at.x > ends[1] + 4) return leave();
    let nearest, lines = [];
    for (const group of plot.querySelectorAll('g[data-name]')) {
      const all = coordinates(group);
      // Of a curve without a name only its course, not what stands behind it.
      if (!all.length || !group.dataset.name && group.querySelector('.faint, .dashed')) continue;
      const own = all.reduce((a, b) => Math.abs(b[0] - at.x) < Math.abs(a[0] - at.x) ? b : a);
      if (Math.abs(own[0] - at.x) > 40) continue;
      if (!nearest || Math.abs(own[0] - at.x) < Math.abs(nearest - at.x)) nearest = own[0];
      const name = group.dataset.name ? `${group.dataset.name}: ` : '';
      lines.push([own[1], name + short(y(own[1]))]);
    }
    if (!lines.length) return leave();
    lines.sort((a, b) => a[0] - b[0]);
    tip.textContent = [short(x(nearest)), ...lines.map(line => line[1])].join('\n');
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), right = event.clientX + 16;
    tip.style.left = (right + box.width < innerWidth ? right : Math.max(4, event.clientX - 16 - box.width)) + 'px';
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - box.height - 4)) + 'px';
    rule?.remove();
    rule = document.createElementNS(svg.namespaceURI, 'line');
    const [, , , bottom, top] = plot.dataset.y.split(' ');
    Object.entries({class: 'axis', x1: nearest, x2: nearest, y1: top, y2: bottom}).forEach(([k, v]) => rule.setAttribute(k, v));
    plot.prepend(rule);
  });
  document.addEventListener('pointerleave', leave);
}
