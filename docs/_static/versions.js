// Fills the switch of versions from ../versions.json, which .ci/versions.py writes beside the folders of the versions.
document.addEventListener("DOMContentLoaded", async () => {
  const box = document.querySelector(".versions");
  if (!box || !location.protocol.startsWith("http")) return;
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const response = await fetch(new URL("../versions.json", root)).catch(() => null);
  if (!response || !response.ok) return;
  const versions = await response.json();
  const current = root.pathname.split("/").at(-2);
  const select = box.querySelector("select");
  for (const version of versions) select.add(new Option(version, version, false, version === current));
  select.addEventListener("change", async () => {
    const home = new URL(`../${select.value}/`, root);
    const page = new URL(box.dataset.page, home);
    const found = await fetch(page, { method: "HEAD" }).catch(() => null);
    location.href = found && found.ok ? page : home;
  });
  box.hidden = false;
});
