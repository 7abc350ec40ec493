// Summaries of search results are fetched, which browsers refuse to pages opened from the file system.
if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
// What is wider than the page scrolls in its own place, and so has to be reachable by keyboard.
addEventListener('load', async () => {
  await window.MathJax?.startup?.promise;
  document.querySelectorAll('article .math > mjx-container').forEach(e => e.classList.toggle('wide', e.scrollWidth > e.closest('article').clientWidth || e.getBoundingClientRect().right > innerWidth));
  document.querySelectorAll('.cell_output, .table-wrapper, pre').forEach(e => { if (e.scrollWidth > e.clientWidth) e.tabIndex = 0; });
});
