// Lets the search work where the site is opened as a file, without a network: browsers start no
// workers from files, so a hidden frame stands in for one.
// Shortened from iframe-worker 1.0.3, copyright (c) 2020-2022 Martin Donath, MIT licence:
// https://github.com/squidfunk/iframe-worker
if (location.protocol === "file:") {
  const runtime = `
    postMessage = (message, origin) => parent.postMessage(message, origin || "*");
    importScripts = (...urls) => urls.reduce((before, src) => before.then(() => new Promise((resolve) => {
      document.body.appendChild(Object.assign(document.createElement("script"), { src, onload: resolve }));
    })), Promise.resolve());`;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write(`<html><body><script>${runtime}</script><script src="${url}"></script></body></html>`);
      inside.document.close();
      this.ready = new Promise((resolve) => { inside.onload = resolve; });
      addEventListener("message", (event) => {
        if (event.source === inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
