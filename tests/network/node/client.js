// A caller in another language, made of the .proto files and of docs/grpc.md alone: prints what it is told as JSON.
//   node client.js ADDRESS TOKEN PROTO_FOLDER NAMESPACE TOKENS          TOKENS: ids with commas between
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, token, folder, namespace, tokens] = process.argv.slice(2);
const files = ["store", "score", "admin"].map((name) => `kvstore/wire/${name}.proto`);
const options = { includeDirs: [folder], longs: Number, defaults: true, keepCase: true };
const { kvstore } = grpc.loadPackageDefinition(loader.loadSync(files, options));
const settings = { "grpc.enable_http_proxy": 0, "grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 1000 };
const credentials = grpc.credentials.createInsecure();
const store = new kvstore.v1.Store(address, credentials, settings);
const score = new kvstore.v1.Score(address, credentials, settings);
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${token}`);

const ask = (client, method, request, more = { deadline: Date.now() + 60000 }) =>
  new Promise((resolve) =>
    client[method](request, metadata, more, (error, answer) =>
      resolve(error ? { code: error.code, details: error.details } : answer)
    )
  );

(async () => {
  const prompt = { token_ids: tokens.split(",").map(Number) };
  console.log(
    JSON.stringify({
      namespaces: await ask(store, "Namespaces", {}),
      match: await ask(store, "Match", { namespace, prompt }),
      score: await ask(score, "Score", { namespace, prompt }),
      without_deadline: await ask(store, "Namespaces", {}, {}),
    })
  );
  process.exit(0);
})();
