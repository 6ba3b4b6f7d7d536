// Before anything is painted: the theme that was chosen here, or the system's.
"use strict";
(() => {
  const root = document.documentElement;
  let chosen = null;
  try { chosen = localStorage.getItem("kvstore-theme"); } catch { /* storage is off */ }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  dark.addEventListener("change", apply);
  globalThis.switchTheme = () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("kvstore-theme", chosen); } catch { /* storage is off */ }
    apply();
  };
  apply();
})();
