// Summaries of search results are fetched, which browsers refuse to pages opened from the file system.
if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
// What is wider than the page scrolls in its own place, and so has to be reachable by keyboard.
addEventListener('load', async () => {
  await window.MathJax?.startup?.promise;
  document.querySelectorAll('article .math > mjx-container').forEach(e => e.classList.toggle('wide', e.scrollWidth > e.closest('article').clientWidth || e.getBoundingClientRect().right > innerWidth));
  document.querySelectorAll('.cell_output, .table-wrapper, pre').forEach(e => { if (e.scrollWidth > e.clientWidth) e.tabIndex = 0; });
});
// The sidebar is one list a chapter; all but that of the page are closed. Without JavaScript all are open.
addEventListener('DOMContentLoaded', () => {
  const captions = document.querySelectorAll('.sidebar-tree > .caption'), at = document.querySelector('.sidebar-tree .current-page');
  for (const caption of captions) {
    const list = caption.nextElementSibling, chapter = document.createElement('details'), name = document.createElement('summary');
    if (!list) continue;
    chapter.open = at ? list.contains(at) : caption === captions[0]; // the first on the title page
    caption.before(chapter);
    name.append(caption), chapter.append(name, list);
  }
  const box = document.querySelector('.sidebar-scroll');
  if (at && box) box.scrollTop += at.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight/3;
});
