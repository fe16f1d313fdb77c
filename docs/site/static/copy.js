// A button on each block of code that copies it: of a Python session the input alone.
"use strict";

function textOf(block) {
  const lines = block.innerText.replace(/\n$/, "").split("\n");
  const input = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
  return input.length ? input.map((line) => line.slice(4)).join("\n") : lines.join("\n");
}

function addButton(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy this block of code");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(textOf(block));
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.parentElement.append(button);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("div.highlight > pre").forEach(addButton);
});
