// Session of onnxruntime-web (WASM): node wasm_session.mjs PACKAGE FOLDER
// Opens FOLDER/model.onnx. Each line of stdin describes a feed, whose values are FOLDER/in0.bin and so on; outputs are
// written to FOLDER/out0.bin and so on, and described by a line of stdout. Errors are such a line as well.
import fs from 'node:fs';
import path from 'node:path';
import readline from 'node:readline';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [root, folder] = process.argv.slice(2);
const reply = (value) => process.stdout.write(JSON.stringify(value) + '\n');
const failed = (error) => reply({ error: String(error?.message ?? error).split('\n')[0].slice(0, 400) });
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, int8: Int8Array, uint8: Uint8Array,
  int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array,
  uint64: BigUint64Array, bool: Uint8Array,
};
console.log = console.error;
const module = createRequire(path.join(root, 'package.json')).resolve('onnxruntime-web');
const loaded = await import(pathToFileURL(module).href);
const ort = loaded.default ?? loaded;
ort.env.wasm.numThreads = 1;
ort.env.logLevel = 'fatal';

function tensor(row, number) {
  const bytes = fs.readFileSync(path.join(folder, `in${number}.bin`));
  const copy = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  return new ort.Tensor(row.type, new ARRAYS[row.type](copy), row.dims);
}

async function run(session, rows) {
  const feed = Object.fromEntries(rows.map((row, number) => [row.name, tensor(row, number)]));
  const results = await session.run(feed);
  return session.outputNames.map((name, number) => {
    const { data, dims, type } = results[name];
    fs.writeFileSync(path.join(folder, `out${number}.bin`), Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    return { name, dims, type };
  });
}

let session;
try {
  const bytes = new Uint8Array(fs.readFileSync(path.join(folder, 'model.onnx')));
  session = await ort.InferenceSession.create(bytes, { executionProviders: ['wasm'] });
  reply({});
} catch (error) {
  failed(error);
  process.exit(0);
}
for await (const line of readline.createInterface({ input: process.stdin })) {
  try {
    reply({ outputs: await run(session, JSON.parse(line)) });
  } catch (error) {
    failed(error);
  }
}
