// Summaries of search results are fetched, which browsers refuse to pages opened from the file system.
if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
// What is wider than the page scrolls in its own place, and so has to be reachable by keyboard.
addEventListener('load', async () => {
  await window.MathJax?.startup?.promise;
  document.querySelectorAll('article .math > mjx-container').forEach(e => e.classList.toggle('wide', e.scrollWidth > e.closest('article').clientWidth || e.getBoundingClientRect().right > innerWidth));
  document.querySelectorAll('.cell_output, .table-wrapper, pre').forEach(e => { if (e.scrollWidth > e.clientWidth) e.tabIndex = 0; });
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
