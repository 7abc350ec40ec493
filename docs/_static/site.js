// Summaries of search results are fetched, which browsers refuse to pages opened from the file system.
if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
// What is wider than the page scrolls in its own place, and so has to be reachable by keyboard.
addEventListener('load', async () => {
  await window.MathJax?.startup?.promise;
  document.querySelectorAll('article .math > mjx-container').forEach(e => e.classList.toggle('wide', e.scrollWidth > e.closest('article').clientWidth || e.getBoundingClientRect().right > innerWidth));
  document.querySelectorAll('.cell_output, .table-wrapper, pre').forEach(e => { if (e.scrollWidth > e.clientWidth) e.tabIndex = 0; });
});
// A line of code that is too long goes on under its comment, or a little further in than it began.
addEventListener('DOMContentLoaded', () => {
  for (const pre of document.querySelectorAll('article .highlight-python pre')) {
    pre.innerHTML = pre.innerHTML.trimEnd().split('\n').map(line => `<span class="line">${line}\n</span>`).join('');
    for (const line of pre.children) {
      const text = line.textContent.trimEnd(), at = text.length - (line.querySelector('.c1')?.textContent.length ?? 0);
      const further = at < Math.min(text.length, 64) ? at + 2 : text.search(/\S|$/) + 4;
      line.style = `display: block; padding-left: ${further}ch; text-indent: -${further}ch`;
    }
  }
});
// The sidebar is one list a chapter, and a chapter such as "Methods / Aggregation" is a part of "Methods". All but
// those of the page are closed. Without JavaScript all are open.
addEventListener('DOMContentLoaded', () => {
  const captions = document.querySelectorAll('.sidebar-tree > .caption'), at = document.querySelector('.sidebar-tree .current-page');
  const chapters = {};
  for (const caption of captions) {
    const list = caption.nextElementSibling, chapter = document.createElement('details'), name = document.createElement('summary');
    const [whole, part] = caption.textContent.trim().split(' / ');
    if (!list) continue;
    if (part) {
      if (!chapters[whole]) { // no page stands in the chapter itself
        chapters[whole] = document.createElement('details');
        chapters[whole].innerHTML = `<summary><p class="caption"><span class="caption-text">${whole}</span></p></summary>`;
        caption.before(chapters[whole]);
      }
      caption.querySelector('.caption-text').textContent = part;
    } else chapters[whole] = chapter;
    (part ? (e => chapters[whole].append(e)) : (e => caption.before(e)))(chapter);
    name.append(caption), chapter.append(name, list);
  }
  for (const chapter of document.querySelectorAll('.sidebar-tree details'))
    chapter.open = at ? chapter.contains(at) : chapter === document.querySelector('.sidebar-tree details'); // the first on the title page
  const box = document.querySelector('.sidebar-scroll');
  if (at && box) box.scrollTop += at.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight/3;
});

// A click on a heading of a sortable table sorts it, by the first number of a cell where all cells have one.
addEventListener('DOMContentLoaded', () => {
  for (const heading of document.querySelectorAll('.sortable th')) {
    heading.tabIndex = 0;
    const sort = () => {
      const body = heading.closest('table').tBodies[0], at = heading.cellIndex, down = heading.getAttribute('aria-sort') === 'ascending';
      const text = row => row.cells[at].textContent.trim(), number = row => parseFloat(text(row).replace('\u2212', '-'));
      const rows = [...body.rows], known = rows.filter(row => text(row) !== '\u2013'), numbers = known.every(row => !isNaN(number(row)));
      const order = (a, b) => numbers ? number(a) - number(b) : text(a).localeCompare(text(b), 'en', {numeric: true});
      known.sort((a, b) => down ? order(b, a) : order(a, b));
      body.append(...known, ...rows.filter(row => text(row) === '\u2013')); // what is not known stays below
      for (const other of heading.parentElement.cells) other.removeAttribute('aria-sort');
      heading.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    };
    heading.addEventListener('click', sort);
    heading.addEventListener('keydown', event => { if (event.key === 'Enter') sort(); });
  }
});
