// The form is the address and the address is the form; whatever changes it asks a new question.
"use strict";
(function () {
  const form = () => document.getElementById("controls");
  const further = "further";
  // A plain web server knows the type of a file by its name, and Dash reads nothing but JSON.
  const dash_question = /\/_dash-(layout|dependencies)$/;
  const quote = (text) => (/^[\w.,:\/+=\[\]-]*$/.test(text) ? text : "'" + text.replaceAll("'", "'\\''") + "'");

  function read_dash_files() {
    const fetch_as_it_was = window.fetch.bind(window);
    window.fetch = (url, options) => fetch_as_it_was(dash_question.test(url) ? url + ".json" : url, options);
  }

  function query_of_form() {
    const query = new URLSearchParams();
    for (const field of form().elements) {
      if (field.name && field.value.trim()) query.append(field.name, field.value.trim());
    }
    return "?" + query.toString();
  }

  function fill_form(search) {
    const query = new URLSearchParams(search);
    const rest = [];
    for (const field of form().elements) if (field.name) field.value = query.get(field.name) ?? default_of(field);
    for (const [key, value] of query) {
      if (key === further) rest.push(value);
      else if (!form().elements.namedItem(key)) rest.push(quote(key + "=" + value));
    }
    const field = form().elements.namedItem(further);
    if (field) field.value = rest.join(" ");
  }

  function default_of(field) {
    const defaults = JSON.parse(form().dataset.defaults || "{}");
    return defaults[field.name] ?? (document.body.hasAttribute("data-static") ? field.options[0].value : "");
  }

  function ask() {
    document.getElementById("copied").textContent = "";
    window.dash_clientside.set_props("model-settings", { data: null });
    window.dash_clientside.set_props("address", { data: window.location.search || query_of_form() });
  }

  function go(search) {
    if (search !== window.location.search) window.history.pushState(null, "", search);
    ask();
  }

  async function copy(text, note) {
    try {
      await navigator.clipboard.writeText(text);
      document.getElementById("copied").textContent = note;
    } catch {
      document.getElementById("copied").textContent = "The browser does not allow copying.";
    }
  }

  async function read_file(file) {
    if (!file) return;
    window.dash_clientside.set_props("model-file", { data: { name: file.name, text: await file.text(), at: Date.now() } });
  }

  function begin() {
    fill_form(window.location.search);
    const more = document.getElementById("more");
    if (more && window.matchMedia("(max-width: 52rem)").matches) more.open = false;
    form().addEventListener("submit", (event) => event.preventDefault());
    form().addEventListener("change", (event) => {
      if (event.target.type === "file") read_file(event.target.files[0]);
      else go(query_of_form());
    });
    form().addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target.matches("input[name]")) {
        event.preventDefault();
        go(query_of_form());
      }
    });
    for (const kind of ["dragover", "drop"]) {
      document.addEventListener(kind, (event) => {
        if (document.body.hasAttribute("data-static") || !event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        if (kind === "drop") read_file(event.dataTransfer.files[0]);
      });
    }
    document.addEventListener("click", (event) => {
      const step = event.target.closest("[data-steps]");
      const copying = event.target.closest("[data-copies]");
      const link = event.target.closest('a[href^="?"]');
      if (step) {
        const field = form().elements.namedItem(step.dataset.steps);
        field.value = Math.max(1, Math.floor(Number(field.value) * Number(step.dataset.factor))) || field.value;
        go(query_of_form());
      } else if (copying) copy(document.getElementById(copying.dataset.copies).textContent, "The command is copied.");
      else if (event.target.id === "copy-address") copy(window.location.href, "The address is copied.");
      else if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
        event.preventDefault();
        fill_form(link.getAttribute("href"));
        go(document.body.hasAttribute("data-static") ? query_of_form() : link.getAttribute("href"));
        document.getElementById("answer").focus({ preventScroll: true });
        window.scrollTo({ top: 0 });
      }
    });
    window.addEventListener("popstate", () => {
      fill_form(window.location.search);
      ask();
    });
    window.history.replaceState(null, "", query_of_form());
    ask();
  }

  function when_ready() {
    if (document.getElementById("progress") && window.dash_clientside.set_props) begin();
    else window.setTimeout(when_ready, 30);
  }
  window.addEventListener("load", when_ready);
  if (document.body.hasAttribute("data-static")) read_dash_files();

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    explorer: {
      // Of the question, or of the file dropped since it was asked.
      show_refusal: function (refusal_of_question, model) {
        const refusal = model?.sentence ? model : refusal_of_question;
        for (const place of document.querySelectorAll(".error")) place.textContent = "";
        for (const field of form().elements) field.removeAttribute("aria-invalid");
        if (refusal) {
          const place = document.getElementById("error-" + refusal.key) ?? document.getElementById("error-" + further);
          if (place) place.textContent = refusal.sentence;
          form().elements.namedItem(refusal.key)?.setAttribute("aria-invalid", "true");
        }
        return window.dash_clientside.no_update;
      },
      take_model: function (model) {
        if (!model?.settings) return window.dash_clientside.no_update;
        go("?" + new URLSearchParams({ ...read_form_without_model(), ...model.settings }));
        fill_form(window.location.search);
        return window.dash_clientside.no_update;
      },
      // Of a page whose answers are files: every state of the form is one of them.
      read_answer: async function (address) {
        const unchanged = window.dash_clientside.no_update;
        if (!address) return [...Array(8).fill(unchanged), true, unchanged, unchanged];
        const names = await (await fetch("answers/index.json")).json();
        const key = [...new URLSearchParams(address)].filter(([, value]) => value).map((pair) => pair.join("=")).sort().join("&");
        if (!(key in names)) {
          const sentence = "This combination was not computed before: choose other values.";
          const note = { type: "P", namespace: "dash_html_components", props: { children: sentence, className: "note" } };
          return [[note], [], [], [], [], [], "", [], true, { address }, null];
        }
        const answer = await (await fetch("answers/" + names[key])).json();
        return [...answer.sections, "", [], true, { address }, answer.refusal];
      },
    },
  });

  function read_form_without_model() {
    const fields = [...new URLSearchParams(query_of_form())];
    return Object.fromEntries(fields.filter(([key]) => key !== "model" && key !== further));
  }
})();
