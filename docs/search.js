// Titles tell more than text: a page whose title begins with what is asked comes first, then one whose
// title or heading has all its words, then the rest in Sphinx's order. Of equals a guide comes first, the recipes before
// all where one is for what is asked, and a page of the internals last: docs/conf.py puts their names into this file.
// Before all is a page that docs/asked.yml names for what is asked, and the list of results for a paper's table or figure.
const chapters = {guides: [], internals: [], recipes: [], asked: {}, small: []};
const asked = (new URLSearchParams(location.search).get('q') ?? '').toLowerCase().trim();
const words = text => text.toLowerCase().split(/[^\p{L}\p{N}-]+/u).filter(Boolean);
const stem = word => word.length > 3 ? word.replace(/(ed|es|e|s)$/, '') : word;
const holds = text => words(asked).every(q => words(text).some(w => stem(w) === stem(q)));
const named = title => title.toLowerCase().split(/ and |, /).some(name => words(name).every(w => words(asked).includes(w)));
const numbered = /\b(table|fig(ure)?)\.?\s*\d/.test(asked);
const gist = text => words(text).filter(w => !chapters.small.includes(w) && !/^\d+$/.test(w)).map(stem).sort().join(' ');
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 10, partialTitle: 5, term: 5, partialTerm: 1,
  score: ([docname, title, anchor, descr, score]) => {
    const path = title.split(' > '), last = path[path.length - 1].toLowerCase(), guide = chapters.guides.includes(docname);
    if (chapters.internals.includes(docname)) score -= 200;
    if (guide && path.length === 1) score += holds(last) ? 25 : 10;
    if (docname.startsWith('methods/') && path.length === 1 && named(title)) score += 60; // "FedProx mu"
    if (docname === 'guides/recipes' && path.length === 1 && chapters.recipes.some(holds)) score += 150;
    if (path.length === 1 && (chapters.asked[docname] ?? []).some(t => gist(t) === gist(asked))) score += 300;
    if (docname === 'papers/results' && path.length === 1 && numbered) score += 300;
    if (last === asked) return score + (path.length > 1 ? 60 : 100);
    if (path.length === 1 && last.startsWith(asked)) return score + 50;
    return score + (holds(last) ? (path.length > 1 ? 20 : 40) : 0);
  },
};
