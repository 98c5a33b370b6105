// Questions to the server. A browser gives the token of its link away for a key, and shows that with each question.
const KEY = "hpcray-dashboard-key";
const PATIENCE = 60_000; // ms
let key = "";

export class AskError extends Error {
  constructor(text, status, ended) {
    super(text);
    this.status = status;
    this.ended = ended;
  }
}

function stored(value) {
  try {
    if (value === undefined) return localStorage.getItem(KEY) || "";
    localStorage.setItem(KEY, value);
  } catch { /* no storage: the key is good until the page is left */ }
  return value || "";
}

async function request(path, options, bearer) {
  let answer;
  try {
    answer = await fetch(path, {
      ...options,
      headers: { Authorization: `Bearer ${bearer}`, ...(options?.body ? { "Content-Type": "application/json" } : {}) },
      signal: AbortSignal.timeout(PATIENCE),
    });
  } catch {
    throw new AskError("No connection: the dashboard has ended, or the tunnel is closed. Trying again.", 0, false);
  }
  const body = await answer.json().catch(() => ({ error: answer.statusText }));
  if (!answer.ok) throw new AskError(body.error || answer.statusText, answer.status, Boolean(body.ended));
  return body;
}

export async function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  key = stored();
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  try {
    key = stored((await request("api/enter", { method: "POST" }, token)).key);
  } catch (error) {
    if (!key) throw error; // a link that this browser used before
  }
}

export function ask(path, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  return request(`api/${path}${query ? `?${query}` : ""}`, {}, key);
}

export function act(path, body) {
  return request(`api/actions/${path}`, { method: "POST", body: JSON.stringify(body) }, key);
}
