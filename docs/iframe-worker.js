"use strict";
// A page that was opened as a file may not start a worker, and the search is one. Here it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const script = document.createElement("script");
      script.src = address;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = script.outerHTML;
      this.started = new Promise((start) => {
        this.frame.onload = () => {
          this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          start(this.frame.contentWindow);
        };
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.started.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
