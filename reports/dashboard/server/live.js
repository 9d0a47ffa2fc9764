// A page that is served: it asks now and then whether there is something new, and takes it over where the reader is.

const ASK_MS = 2000;
const MOST_MS = 15000; // where nothing happens
const MOST_AFTER_TROUBLE_MS = 60000;
const PATIENCE_MS = 90000; // the server itself waits for its database no longer

const live = { version: 0, first: 0, wait: ASK_MS, timer: null, note: null };
const embedded = blocks.read;

/** Requests data below the address of the page, without what stands after #. */
async function request(path) {
  const address = new URL(path, location.origin + location.pathname);
  const signal = AbortSignal.timeout(PATIENCE_MS);
  return fetch(address, { cache: "no-store", credentials: "omit", redirect: "error", signal }).catch((error) => {
    throw new Error(error.name === "TimeoutError" ? "the server does not answer" : "the server has stopped");
  });
}

async function asked(path) {
  const answer = await request(path);
  if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).trim()}`);
  return answer;
}

const told = (async () => {
  const { version } = JSON.parse(new TextDecoder().decode(await embedded("live")));
  live.version = live.first = version;
})();

/** The blocks of the page are of its first state. */
blocks.read = async (id) => {
  await told;
  const { version } = live;
  if (byId(id) && version === live.first) return embedded(id);
  const answer = await request(`${version}/${id}`);
  if (answer.ok) return answer.arrayBuffer();
  if (answer.status === 404) await takeNewer();
  // whoever asked for a state that is gone is not answered: what is shown was drawn anew from the newer one
  if (version !== live.version) return new Promise(() => {});
  throw new Error(`the server has no ${id}`);
};

function tellLive(text, { bad = false } = {}) {
  live.note ??= make("p", { id: "live-note", role: "status", "aria-live": "off" });
  if (!live.note.isConnected) byId("summary").after(live.note);
  live.note.textContent = text;
  live.note.classList.toggle("state-failed", bad);
}

function clock(moment) {
  const then = new Date(moment);
  const format = then.toDateString() === new Date().toDateString() ? "toLocaleTimeString" : "toLocaleString";
  return then[format]([], { hour12: false });
}

/** Replaces the footer of the file, which says that it works offline: this page needs its server. */
const tellFooter = () =>
  (byId("footer").textContent = `Served by atma-sweep ${data.version} from the database, on this machine only.`);

async function takeNewer() {
  const { version, ...newer } = await (await asked("data")).json();
  if (version <= live.version) return; // overtaken by another answer
  live.version = version;
  refresh(newer);
  document.documentElement.dataset.version = version;
  tellFooter();
}

/** Asks, tells what came of it, and gives how long to wait before asking again. */
async function look() {
  try {
    const state = await (await asked("state")).json();
    const newer = state.version !== live.version;
    if (newer) await takeNewer();
    if (state.trouble)
      tellLive(`The numbers are those of ${clock(state.at)}; the update failed: ${state.trouble}.`, { bad: true });
    else tellLive(`Live; the numbers are those of ${clock(state.at)}.`);
    return newer ? ASK_MS : Math.min(Math.max(live.wait, ASK_MS) * 1.2, MOST_MS);
  } catch (error) {
    const more = "The page shows the last numbers; restart it with atma-sweep dashboard.";
    tellLive(`No longer live: ${error.message}. ${more}`, { bad: true });
    return Math.min(live.wait * 2, MOST_AFTER_TROUBLE_MS);
  }
}

async function ask() {
  clearTimeout(live.timer);
  live.wait = await look();
  clearTimeout(live.timer);
  // a page that nobody looks at asks for nothing
  if (!document.hidden) live.timer = setTimeout(ask, live.wait);
}

// the page starts by reading its own blocks; one that cannot start does not go live
Promise.all([told, started]).then(() => {
  tellFooter();
  document.addEventListener("visibilitychange", () => {
    live.wait = ASK_MS;
    if (!document.hidden) ask();
  });
  ask();
}, () => {}); // prettier-ignore
