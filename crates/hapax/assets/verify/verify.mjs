import crypto from "node:crypto";

// body: the bytes of the request as they came, before any parsing.
export function verify(secret, headers, body) {
  const [id, timestamp] = [headers["webhook-id"], headers["webhook-timestamp"]];
  if (!(Math.abs(Date.now() / 1000 - Number(timestamp)) <= 300)) return false;
  const key = Buffer.from(secret.slice("whsec_".length), "base64");
  const expected = crypto.createHmac("sha256", key).update(`${id}.${timestamp}.`).update(body).digest();
  return (headers["webhook-signature"] ?? "").split(" ").some((one) => {
    const given = Buffer.from(one.slice("v1,".length), "base64");
    return one.startsWith("v1,") && given.length === expected.length && crypto.timingSafeEqual(given, expected);
  });
}
