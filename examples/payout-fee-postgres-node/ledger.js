// What app.js and once.js share: the pool, one transaction, the fee, and where to die.

import pg from "pg";

export function openPool() {
  const pool = new pg.Pool({
    connectionString: process.env.DATABASE_URL ?? "postgres://payout_app@127.0.0.1/payouts",
    connectionTimeoutMillis: 4000,
    max: 16,
  });
  // A connection that breaks fails the query that needed it; it is not the end of the app, which an
  // "error" that nobody listens for would be, in a pool at rest and in the middle of a transaction.
  pool.on("error", () => {});
  pool.on("connect", (database) => database.on("error", () => {}));
  return pool;
}

// Runs `work` between BEGIN and COMMIT. Whatever it throws rolls all of it back.
export async function transaction(pool, work) {
  const database = await pool.connect();
  try {
    await database.query("BEGIN");
    const result = await work(database);
    await database.query("COMMIT");
    database.release();
    return result;
  } catch (error) {
    // Closed instead of rolled back by a statement, which a broken connection could not carry out:
    // the server rolls back, and the pool opens another one.
    database.release(true);
    throw error;
  }
}

// 0.5 % in minor units; half of one is rounded up.
export function feeOf(amount) {
  return Number((BigInt(amount) * 5n + 500n) / 1000n);
}

// Dies here when told to, as a machine would that loses its power.
export function step(name) {
  if (process.env.DIE_AT !== name) return;
  process.kill(process.pid, "SIGKILL");
  // The signal is on its way; nothing more may be done until it is here.
  for (;;);
}
