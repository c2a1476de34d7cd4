import base64, hashlib, hmac, time

def verify(secret, headers, body):
    """body: the bytes of the request as they came, before any parsing."""
    message_id, timestamp = headers["webhook-id"], headers["webhook-timestamp"]
    if not timestamp.isdigit() or abs(time.time() - int(timestamp)) > 300:
        return False
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{message_id}.{timestamp}.".encode() + body
    expected = b"v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest())
    signatures = headers["webhook-signature"].split(" ")
    return any(hmac.compare_digest(one.encode(), expected) for one in signatures)
