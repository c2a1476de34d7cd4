// Shared by app.js and once.js: the pool, one transaction, the fee, and the steps of DIE_AT.

import pg from "pg";

export function openPool() {
  const pool = new pg.Pool({
    connectionString: process.env.DATABASE_URL ?? "postgres://payout_app@127.0.0.1/payouts",
    connectionTimeoutMillis: 4000,
    max: 16,
  });
  // A broken connection fails its query and must not end the app. Without listeners an "error" event
  // would end the app. The pool emits the event for an idle connection, a connection in use emits it itself.
  pool.on("error", () => {});
  pool.on("connect", (database) => database.on("error", () => {}));
  return pool;
}

// Runs `work` between BEGIN and COMMIT. An exception rolls everything back.
export async function transaction(pool, work) {
  const database = await pool.connect();
  try {
    await database.query("BEGIN");
    const result = await work(database);
    await database.query("COMMIT");
    database.release();
    return result;
  } catch (error) {
    // A broken connection could not run ROLLBACK. So the connection is closed: the server rolls back,
    // and the pool opens another one.
    database.release(true);
    throw error;
  }
}

// 0.5 % in minor units; half a unit is rounded up.
export function feeOf(amount) {
  return Number((BigInt(amount) * 5n + 500n) / 1000n);
}

// Kills the process if DIE_AT names this step.
export function step(name) {
  if (process.env.DIE_AT !== name) return;
  process.kill(process.pid, "SIGKILL");
  // The signal is on its way; nothing else may happen until it arrives.
  for (;;);
}
