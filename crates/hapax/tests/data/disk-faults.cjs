// Preloaded into the Node examples: the disk fails once. FAULT is "fsync" (the bytes are in the file, but the sync
// fails) or "short" (a write takes only the first ten bytes).
const fs = require("node:fs");
const { fsyncSync, writeSync } = fs;
let fault = process.env.FAULT;

fs.fsyncSync = (file) => {
  if (fault === "fsync") {
    fault = undefined;
    throw new Error("EIO: the sync failed");
  }
  fsyncSync(file);
};

fs.writeSync = (file, data, ...rest) => {
  if (fault !== "short") return writeSync(file, data, ...rest);
  fault = undefined;
  return writeSync(file, Buffer.from(data), 0, 10);
};
