// Titles tell more than text: a page whose title begins with what is asked comes first, then one whose
// title or heading has all its words, then the rest in Sphinx's order. Of equals a guide comes first, and a page of
// the internals last: docs/conf.py puts the names of both into this file, from the sidebar.
const chapters = {guides: [], internals: []};
const asked = (new URLSearchParams(location.search).get('q') ?? '').toLowerCase().trim();
const words = text => text.toLowerCase().split(/[^\p{L}\p{N}-]+/u).filter(Boolean);
const stem = word => word.length > 3 ? word.replace(/(ed|es|e|s)$/, '') : word;
const holds = text => words(asked).every(q => words(text).some(w => stem(w) === stem(q)));
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 10, partialTitle: 5, term: 5, partialTerm: 1,
  score: ([docname, title, anchor, descr, score]) => {
    const path = title.split(' > '), last = path[path.length - 1].toLowerCase(), guide = chapters.guides.includes(docname);
    if (chapters.internals.includes(docname)) score -= 200;
    if (guide) score += holds(last) ? 60 : 10;
    if (last === asked) return score + (path.length > 1 ? 60 : 100);
    if (path.length === 1 && last.startsWith(asked)) return score + 50;
    return score + (holds(last) ? (path.length > 1 ? 20 : 40) : 0);
  },
};
