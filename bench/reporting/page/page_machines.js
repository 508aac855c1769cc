// Two machines side by side: of all pairs that the page holds, the one that was chosen.

const pairForm = byId("pair");
if (pairForm) {
  const pairs = [...document.querySelectorAll("details.pair")];
  const showPair = () => {
    const chosen = [byId("pair-first").value, byId("pair-second").value];
    let found = null;
    for (const pair of pairs) {
      const here = chosen.includes(pair.dataset.first) && chosen.includes(pair.dataset.second) && chosen[0] !== chosen[1];
      pair.hidden = !here;
      pair.open = here;
      if (here) found = pair;
    }
    byId("pair-said").textContent = found
      ? `${found.dataset.second} is compared with ${found.dataset.first}: a change is what ${found.dataset.second} takes beyond ${found.dataset.first}.`
      : "Choose two different machines.";
  };
  pairForm.addEventListener("input", showPair);
  pairForm.addEventListener("submit", (event) => event.preventDefault());
  pairForm.hidden = false;
  showPair();
}
