// Reads files and replays them, while the page stays awake. What wasm-bindgen wrote stands before this.

const CHUNK_BYTES = 1 << 20;

onmessage = ({ data: { module, request, files } }) => {
  const reader = new FileReaderSync();
  const total = files.reduce((sum, { size }) => sum + size, 0);
  let read = 0;
  const source = {
    read(file, offset) {
      const bytes = new Uint8Array(reader.readAsArrayBuffer(files[file].slice(offset, offset + CHUNK_BYTES)));
      read += bytes.length;
      postMessage({ read: total > 0 ? read / total : 1 });
      return bytes;
    },
  };
  wasm_bindgen.initSync({ module });
  try {
    postMessage({ told: JSON.parse(wasm_bindgen.replay(JSON.stringify(request), source)) });
  } catch (failed) {
    // What the library says is a text; all else is a fault of ours.
    if (typeof failed !== "string") throw failed;
    postMessage({ failed });
  }
};
