// Before the page is painted: the theme that the user has chosen, if any.
try {
  const chosen = localStorage.getItem("hpcray-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* no storage: the system's theme */ }
