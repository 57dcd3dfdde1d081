
"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const root = document.documentElement;
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark() ? "dark" : "light";
  get("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });

  // While runs go on, the page asks its own server whether they have changed, and for nothing else.
  const { live } = root.dataset;
  if (live) {
    setInterval(async () => {
      try {
        const answer = await fetch("version");
        if (answer.ok && await answer.text() !== live) location.reload();
      } catch { /* the server has been stopped */ }
    }, 2000);
  }

  const episodes = JSON.parse(get("data").textContent);
  if (!episodes.length) return;
  get("viewer").hidden = false;

  // Every text of a run enters the page here, as text.
  const make = (tag, { text, name, ...rest } = {}, ...children) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    for (const [key, value] of Object.entries(rest)) made.setAttribute(key, value);
    made.append(...children.filter((child) => child !== null));
    return made;
  };

  const byTask = new Map();
  for (const episode of episodes) {
    episode.text = JSON.stringify([episode.id, episode.instruction, episode.task, episode.family, episode.start,
      episode.steps.map((step) => [step.action, step.thought, step.state, step.reasoning])]).toLowerCase();
    if (!byTask.has(episode.task)) byTask.set(episode.task, []);
    byTask.get(episode.task).push(episode);
  }
  for (const run of new Set(episodes.map((episode) => episode.run))) {
    get("run").append(make("option", { text: run, value: run }));
  }

  const LISTED = 300;
  let found = [];
  let chosen = null;
  let pair = { left: null, right: null };
  let at = 0;

  const alike = (one, two) => {
    let length = 0;
    while (length < one.steps.length && length < two.steps.length
      && one.steps[length].action === two.steps[length].action) length += 1;
    return length;
  };
  const others = (episode) => byTask.get(episode.task).filter((each) => each.source === episode.source
    && (each.role === "evaluation") === (episode.role === "evaluation"));
  const closest = (episode, source) => byTask.get(episode.task).filter((each) => each.source === source && each.role !== "evaluation")
    .reduce((best, each) => (best === null || alike(episode, each) > alike(episode, best) ? each : best), null);
  const twin = (episode, role) => byTask.get(episode.task).find((each) =>
    each.role === role && each.run === episode.run && each.id === episode.id) ?? null;
  const step_of = (episode) => Number(/@(\d+)$/.exec(episode.when)?.[1] ?? Infinity);

  // Left and right: a dream and the same actions in reality; or a task in reality before and after.
  const paired = (episode) => {
    if (episode.role === "evaluation") {
      const both = others(episode).sort((one, two) => step_of(one) - step_of(two));
      return both.length > 1 ? { left: both[0], right: both.at(-1) } : { left: null, right: episode };
    }
    if (episode.role === "replay") return { left: twin(episode, "training"), right: episode };
    if (episode.source === "dream") return { left: episode, right: twin(episode, "replay") ?? closest(episode, "real") };
    return { left: closest(episode, "dream"), right: episode };
  };
  const label = (episode) => ({
    replay: "Reality, the same actions", evaluation: `Reality, ${episode.when}`, recorded: "Reality, recorded",
  })[episode.role] ?? (episode.source === "dream" ? "Dream" : "Reality");
  const address = (episode) => `#episode=${encodeURIComponent([episode.run, episode.role, episode.when, episode.id].join(" "))}`;

  const filter = () => {
    const words = get("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [run, source, outcome] = ["run", "source", "outcome"].map((id) => get(id).value);
    found = episodes.filter((episode) =>
      (!run || episode.run === run) && (!source || episode.source === source || episode.role === source)
      && (!outcome || episode.success === (outcome === "success"))
      && words.every((word) => episode.text.includes(JSON.stringify(word).slice(1, -1))));
    const more = found.length > LISTED ? `, the first ${LISTED} are listed` : "";
    get("found").textContent = `${found.length} of ${episodes.length}${more}`;
    get("list").replaceChildren(...found.slice(0, LISTED).map((episode) => {
      const button = make("button", { type: "button" },
        make("span", { text: episode.success ? "✓ " : "✗ ", name: episode.success ? "good" : "bad" }),
        make("span", { text: episode.instruction, name: "instruction" }),
        make("small", { text: `${label(episode).toLowerCase()} · ${episode.run} · ${episode.length} steps · ${episode.id}` }));
      button.addEventListener("click", () => choose(episode, true));
      episode.button = button;
      return make("li", {}, button);
    }));
    if (found.length && !found.includes(chosen)) choose(found[0]);
    else mark();
  };

  const mark = () => {
    for (const episode of found) episode.button?.setAttribute("aria-current", String(episode === chosen));
  };

  const choose = (episode, link = false) => {
    chosen = episode;
    pair = paired(episode);
    if (link) history.replaceState(null, "", address(episode));
    at = 0;
    show();
    mark();
    // Not scrollIntoView, which would move the whole page along.
    const [list, place] = [get("list"), episode.button];
    if (!place?.isConnected) return;
    const [frame, box] = [list.getBoundingClientRect(), place.getBoundingClientRect()];
    if (box.top < frame.top || box.bottom > frame.bottom) list.scrollTop += box.top - frame.top - 40;
  };

  const sheet = (episode) => {
    if (episode.sheet === null) return make("p", { text: "World sheet: not recorded.", name: "note" });
    const cut = episode.facts > episode.sheet.length ? `, the first ${episode.sheet.length} shown` : "";
    return make("details", { name: "sheet" },
      make("summary", { text: `World sheet at the start: ${episode.facts} facts${cut}` }),
      make("ul", {}, ...episode.sheet.map((fact) => make("li", { text: fact }))));
  };

  const head = (side_name, place) => {
    const side = get(place);
    const episode = pair[side_name];
    const source = episode?.source ?? (side_name === "left" ? "dream" : "real");
    side.className = `side ${source}${episode ? "" : " empty"}`;
    const title = make("h4", { text: episode ? label(episode) : source === "dream" ? "Dream" : "Reality" });
    if (!episode) {
      side.replaceChildren(title, make("p", { text: source === "dream"
        ? "No synthetic episode of this task is in the report."
        : "No real episode of this task is in the report; `dreamgym experience audit` replays this one." }));
      return;
    }
    const select = make("select", { "aria-label": `${source} episode of this task` });
    const choices = others(episode);
    for (const each of choices) {
      const option = make("option", { text: `${each.success ? "✓" : "✗"} ${label(each)} · ${each.run} · ${each.policy} v${each.version} · ${each.id}` });
      option.selected = each === episode;
      select.append(option);
    }
    select.addEventListener("change", () => {
      pair[side_name] = choices[select.selectedIndex];
      show();
    });
    const facts = `${episode.success ? "success" : "failure"} · reward ${episode.reward} · ${episode.length} steps`
      + ` · ${episode.policy} after ${episode.version} updates${episode.model ? ` · experience model ${episode.model}` : ""}`;
    const missing = [];
    if (source === "dream" && !episode.steps.some((step) => step.reasoning)) missing.push("reasoning");
    if (source === "dream" && !episode.steps.some((step) => step.prediction)) {
      missing.push("demonstrations", "changes of the world sheet");
    }
    side.replaceChildren(...[title, select, make("p", { text: facts, name: "note" }), sheet(episode),
      missing.length ? make("p", { text: `Not recorded with this episode: ${missing.join(", ")}.`, name: "note missing" }) : null,
    ].filter(Boolean));
  };

  const changes = (prediction) => {
    if (!prediction.ended.length && !prediction.begun.length) return make("p", { text: "World sheet: unchanged.", name: "note" });
    return make("details", { name: "changes", open: "" }, make("summary", { text: "World sheet changes" }),
      make("ul", {}, ...prediction.ended.map((fact) => make("li", { text: `− ${fact}`, name: "bad" })),
        ...prediction.begun.map((fact) => make("li", { text: `+ ${fact}`, name: "good" }))));
  };

  const demonstrations = (shown) => shown.length === 0 ? make("p", { text: "No demonstrations were shown.", name: "note" })
    : make("details", { name: "demonstrations" }, make("summary", { text: `Demonstrations shown: ${shown.length}` }),
      make("ul", {}, ...shown.map((each) => make("li", {},
        make("pre", { text: each.state }), make("div", { text: each.action, name: "action" }), make("pre", { text: each.next_state }),
        make("small", { text: `${each.source} · similarity ${each.similarity} · ${each.trajectory}` })))));

  const cell = (episode, number, source) => {
    if (!episode) return make("div", { name: `side ${source} empty` });
    if (number === 0) return make("div", { name: `side ${source}` }, make("div", { text: episode.start, name: "state" }));
    const step = episode.steps[number - 1];
    if (!step) {
      const cut = number <= episode.length ? "not shown" : "the episode is over";
      return make("div", { name: `side ${source} empty` }, make("p", { text: cut, name: "note" }));
    }
    const marks = make("div", { name: "badges" });
    if (step.success) marks.append(make("span", { text: "success", name: "good" }));
    if (step.end) marks.append(make("span", { text: step.end }));
    if (step.reward) marks.append(make("span", { text: `reward ${step.reward}, by ${step.by}` }));
    if (step.confidence !== null) marks.append(make("span", { text: `confidence ${step.confidence.toFixed(2)}` }));
    if (step.prediction?.refused) marks.append(make("span", { text: "refused", name: "bad" }));
    return make("div", { name: `side ${source}` },
      step.thought ? make("div", { text: step.thought, name: "thought" }) : null,
      make("div", { text: step.action, name: "action" }),
      step.reasoning ? make("div", { text: step.reasoning, name: "reasoning" }) : null,
      make("div", { text: step.state, name: "state" }), marks,
      step.prediction ? changes(step.prediction) : null,
      step.prediction ? demonstrations(step.prediction.demonstrations) : null);
  };

  const verdict = (number, same) => {
    const { left: dream, right: real } = pair;
    if (!dream || !real || number > Math.min(dream.steps.length, real.steps.length)) return null;
    if (number > same) return number === same + 1 ? make("span", { text: "from here on the actions differ" }) : null;
    const states = number === 0 ? [dream.start, real.start] : [dream.steps[number - 1].state, real.steps[number - 1].state];
    return states[0] === states[1] ? make("span", { text: "same state", name: "good" }) : make("span", { text: "states differ", name: "bad" });
  };

  const last = () => Math.max(pair.left?.steps.length ?? 0, pair.right?.steps.length ?? 0);

  const show = () => {
    get("instruction").textContent = chosen.instruction;
    get("task").textContent = [`task ${chosen.task}`, chosen.family, chosen.origin].filter(Boolean).join(" · ");
    head("left", "head-dream");
    head("right", "head-real");
    const { left, right } = pair;
    const same = left && right ? alike(left, right) : 0;
    const rows = [];
    for (let number = 0; number <= last(); number += 1) {
      const row = make("li", {},
        make("div", { name: "number" }, make("span", { text: number === 0 ? "start" : `step ${number}` }), verdict(number, same)),
        make("div", { name: "pair" }, cell(left, number, left?.source ?? "dream"), cell(right, number, right?.source ?? "real")));
      row.addEventListener("click", () => step(number, false));
      rows.push(row);
    }
    get("steps").replaceChildren(...rows);
    step(Math.min(at, last()), false);
  };

  const step = (number, scroll = true) => {
    const rows = get("steps").children;
    rows[at]?.removeAttribute("aria-current");
    at = Math.max(0, Math.min(number, last()));
    rows[at].setAttribute("aria-current", "step");
    if (scroll) rows[at].scrollIntoView({ block: "nearest" });
    get("where").textContent = `step ${at} of ${last()}`;
  };

  const move = (by) => {
    const place = found.indexOf(chosen) + by;
    if (place >= 0 && place < found.length) choose(found[place], true);
  };

  const cycle = () => {
    const outcome = get("outcome");
    outcome.selectedIndex = (outcome.selectedIndex + 1) % outcome.options.length;
    filter();
  };

  const keys = {
    j: () => step(at + 1), ArrowRight: () => step(at + 1), k: () => step(at - 1), ArrowLeft: () => step(at - 1),
    n: () => move(1), p: () => move(-1), f: cycle, "/": () => get("search").focus(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.activeElement.blur();
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const known = Object.hasOwn(keys, event.key) ? keys[event.key] : null;
    if (known) {
      event.preventDefault();
      known();
    }
  });
  get("filters").addEventListener("input", filter);
  get("filters").addEventListener("submit", (event) => event.preventDefault());
  get("back").addEventListener("click", () => step(at - 1));
  get("on").addEventListener("click", () => step(at + 1));
  const linked = episodes.find((episode) => location.hash === address(episode));
  chosen = linked ?? episodes.findLast((episode) => episode.success && episode.source === "dream" && twin(episode, "replay"))
    ?? null;
  if (chosen) choose(chosen);
  filter();
  if (linked) get("episodes").scrollIntoView();
})();
