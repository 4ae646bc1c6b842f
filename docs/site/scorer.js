// Sphinx's search adds these to a result's score: pages that answer a question come before pages that mention it.
const Boost = {"docs/how-to/": 9, "docs/get-started/": 9, "docs/reference/": 3, "docs/explanation/": 3, "docs/project/": -4, "CHANGELOG": -6, "CONTRIBUTING": -6, "docs/reference/generated/": -2};
var Scorer = {
  score: result => {
    const [docname, _title, _anchor, _descr, score] = result;
    const found = Object.keys(Boost).filter(start => docname.startsWith(start));
    return score + found.reduce((sum, start) => sum + Boost[start], 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
