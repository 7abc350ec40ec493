// Summaries of search results are fetched, which browsers refuse to pages opened from the file system.
if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
// What is wider than the screen scrolls, and so has to be reachable by keyboard.
addEventListener('load', () => document.querySelectorAll('.cell_output, .table-wrapper, pre').forEach(e => { if (e.scrollWidth > e.clientWidth) e.tabIndex = 0; }));
