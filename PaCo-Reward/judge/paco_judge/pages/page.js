// What the pages share. A page's own script uses the object `page`.
"use strict";

// A tab that is opened from another one, such as a duplicate, begins with its storage.
if (performance.getEntriesByType("navigation")[0].type !== "reload") {
  sessionStorage.removeItem("paco_tab");
}

const page = {
  // Names this tab in requests, also after a reload: the server knows by it when a name is used in
  // two tabs.
  tab: sessionStorage.paco_tab ||= Math.random().toString(36).slice(2, 10),

  // What removes the error on the page: "POST" an accepted answer, "GET" whatever the server
  // answers; "": there is no error.
  _until: "",

  // Shows a sentence on top of the page; "" removes it. An error stays until an answer is accepted,
  // as a page asks for the state again at once.
  notice(text, bad = false, until = "POST") {
    if (page._until && !bad) return;
    page._until = bad ? until : "";
    const place = document.getElementById("notice");
    place.textContent = text;
    place.classList.toggle("bad", bad);
  },

  // The answer to GET path?query, an object; null after an error, which is shown.
  get(path, query = {}) {
    return page._fetch(`${path}?${new URLSearchParams({ ...query, tab: page.tab })}`, {});
  },

  // The answer to POST path with a JSON body; null after an error, which is shown.
  post(path, body = {}) {
    return page._fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, tab: page.tab }),
    });
  },

  async _fetch(path, options) {
    const method = options.method || "GET";
    let response;
    try {
      response = await fetch(path, options);
    } catch {
      page.notice("The command that serves this page has ended or cannot be reached. " +
        "Answers until now are kept.", true, "GET");
      return null;
    }
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) {
      page.notice(answer.error || `The server answered ${response.status}.`, true, method);
      return null;
    }
    if (method === "POST" || page._until === "GET") {
      page._until = "";
      page.notice("");
    }
    return answer;
  },

  // Calls `ask` every so many seconds while the page is visible, and at once when it becomes so.
  every(seconds, ask) {
    const visible = () => document.hidden || ask();
    setInterval(visible, 1000 * seconds);
    document.addEventListener("visibilitychange", visible);
  },

  // Calls `press(key)` for keys that are no part of a text, a dialog or a shortcut of the browser.
  keys(press) {
    document.addEventListener("keydown", (event) => {
      const other = event.ctrlKey || event.metaKey || event.altKey || event.repeat;
      if (other || document.querySelector("dialog[open]")) return;
      if (/^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
      // Enter and space press a button that has the focus.
      if (event.target.tagName === "BUTTON" && [" ", "Enter"].includes(event.key)) return;
      if (press(event.key.length === 1 ? event.key.toLowerCase() : event.key)) {
        event.preventDefault();
      }
    });
  },

  // An element: page.make("button", { className: "main", onclick: go }, "Go", otherElement).
  make(kind, attributes = {}, ...children) {
    const element = Object.assign(document.createElement(kind), attributes);
    element.append(...children);
    return element;
  },

  // A picture by its opaque name. It tells when it is small, so that its pixels stay sharp.
  picture(name, text) {
    const image = page.make("img", { className: "picture", alt: text });
    image.onload = () => image.classList.toggle("pixels", image.naturalWidth < 128);
    image.src = `/picture/${name}`;
    return image;
  },

  // Loads pictures in advance.
  load(names) {
    for (const name of names) new Image().src = `/picture/${name}`;
  },

  // Shows a picture in full size until a click or a key.
  enlarge(name, text) {
    const image = page.make("img", { src: `/picture/${name}`, alt: text });
    image.onload = () => {
      if (image.naturalWidth >= 128) return;
      image.className = "pixels";
      image.width = 512;
    };
    const dialog = page.make("dialog", {}, image, page.make("p", { className: "soft" }, text));
    dialog.onclick = dialog.onkeydown = () => dialog.close();
    dialog.onclose = () => dialog.remove();
    document.body.append(dialog);
    dialog.showModal();
  },

  // "about 9 minutes", "less than a minute".
  duration(seconds) {
    if (seconds < 45) return "less than a minute";
    const minutes = Math.round(seconds / 60);
    if (minutes < 90) return `about ${minutes} minute${minutes > 1 ? "s" : ""}`;
    return `about ${Math.round(minutes / 60)} hours`;
  },
};

// The key is in the cookie now: it leaves the address and the history.
if (location.search) history.replaceState(null, "", location.pathname);
document.body.prepend(page.make("div", { id: "notice", role: "status" }));
