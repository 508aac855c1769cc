// The static figures: SVG that the page carries compressed, unpacked one after another in the order of the page.

async function showFigures() {
  const images = document.querySelectorAll("img[data-figure]");
  if (!images.length) return;
  const figures = JSON.parse(await unpacked("figures"));
  for (const image of images) {
    image.src = URL.createObjectURL(new Blob([figures[image.dataset.figure]], { type: "image/svg+xml" }));
  }
}

showFigures();
