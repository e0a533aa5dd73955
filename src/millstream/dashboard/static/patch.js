// Makes an element look like new markup with as few changes as that takes. What is still there stays the same node: so do
// the focus, a selection, what was unfolded, the hand on a button, and the place that a screen reader has come to.

export function patch(place, html) {
  const wanted = document.createElement("template");
  wanted.innerHTML = html; // rendered by our own templates, in which every foreign text is escaped
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  children(place, wanted.content);
  // A row that was moved takes its nodes along, and loses the focus on the way.
  if (focused && focused !== document.activeElement && place.contains(focused)) focused.focus({ preventScroll: true });
}

// Rows change places: they are told apart by `data-key`; everything else by where it stands.
function children(place, wanted) {
  const known = new Map();
  for (const one of place.children) if (one.dataset.key) known.set(one.dataset.key, one);
  let at = place.firstChild;
  for (const want of [...wanted.childNodes]) {
    const found = known.get(want.dataset?.key);
    if (found) {
      known.delete(want.dataset.key);
      if (found === at) at = at.nextSibling;
      else place.insertBefore(found, at);
      node(found, want);
    } else if (at && alike(at, want)) {
      const next = at.nextSibling;
      node(at, want);
      at = next;
    } else place.insertBefore(want, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

const alike = (one, other) => one.nodeName === other.nodeName && !one.dataset?.key && !other.dataset?.key;

function node(one, wanted) {
  if (one.nodeType !== Node.ELEMENT_NODE) {
    if (one.data !== wanted.data) one.data = wanted.data;
    return;
  }
  for (const { name } of [...one.attributes]) {
    const folded = name === "open" && one.nodeName === "DETAILS"; // the reader's, not ours
    if (!folded && !wanted.hasAttribute(name)) one.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) if (one.getAttribute(name) !== value) one.setAttribute(name, value);
  children(one, wanted);
}
