// A page that is served: it asks now and then whether there is something new, and takes it over where the reader is.

const ASK_MS = 2000;
const ASK_AFTER_TROUBLE_MS = 10000;

const live = { version: 0, first: 0, timer: null, note: null };
const embedded = blocks.read;

/** Where data are asked for: below the address of the page, without what stands after #. */
function serverAddress(path) {
  return new URL(path, location.origin + location.pathname);
}

async function asked(path) {
  const answer = await fetch(serverAddress(path), { cache: "no-store", credentials: "omit", redirect: "error" });
  if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).trim()}`);
  return answer;
}

/** What stands in the page is of its first state, but for the library, which is always the same. */
blocks.read = async (id) => {
  const here = byId(id) && (live.version === live.first || id === "library");
  return here ? embedded(id) : (await asked(`${live.version}/${id}`)).arrayBuffer();
};

function tellLive(text, { bad = false } = {}) {
  if (!live.note) {
    live.note = make("p", { id: "live", role: "status", "aria-live": "off" });
    byId("summary").after(live.note);
  }
  live.note.textContent = text;
  live.note.classList.toggle("state-failed", bad);
}

function clock(moment) {
  return new Date(moment).toLocaleTimeString([], { hour12: false });
}

/** The words of the file, which says that it asks nothing of the network, are not true of this page. */
function tellFooter() {
  byId("footer").textContent = `Served by atma-sweep ${data.version} from the database, to this machine alone.`;
}

async function takeNewer() {
  const { version, ...newer } = await (await asked("data")).json();
  live.version = version;
  refresh(newer);
  tellFooter();
}

async function ask() {
  clearTimeout(live.timer);
  let wait = ASK_MS;
  try {
    const state = await (await asked("state")).json();
    if (state.version !== live.version) await takeNewer();
    document.documentElement.dataset.version = live.version;
    if (state.trouble) tellLive(`The database does not answer: ${state.trouble}`, { bad: true });
    else tellLive(`Live; the numbers are those of ${clock(state.at)}.`);
  } catch (error) {
    wait = ASK_AFTER_TROUBLE_MS;
    const why = error instanceof TypeError ? "the server has ended" : error.message;
    tellLive(`Not live any more: ${why}. The page shows what it had; atma-sweep dashboard starts anew.`, { bad: true });
  }
  // a page that nobody looks at asks for nothing
  if (!document.hidden) live.timer = setTimeout(ask, wait);
}

async function goLive() {
  const told = JSON.parse(new TextDecoder().decode(await embedded("live")));
  live.version = live.first = told.version;
  tellFooter();
  document.addEventListener("visibilitychange", () => document.hidden || ask());
  await ask();
}

// the page starts by reading what stands in it; whoever waits for that also waits for us
const begun = new MutationObserver(() => {
  if (!document.documentElement.dataset.ready) return;
  begun.disconnect();
  goLive();
});
begun.observe(document.documentElement, { attributes: true, attributeFilter: ["data-ready"] });
