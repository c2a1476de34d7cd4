-- Keeps: one answer per fence. KEYS: the reservation. ARGV: fence, status, headers, body.
local kept = redis.call('HMGET', KEYS[1], 'fence', 'status', 'ttl')
if kept[1] ~= ARGV[1] or kept[2] then
    return 0
end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'headers', ARGV[3], 'body', ARGV[4])
redis.call('PEXPIRE', KEYS[1], kept[3])
return 1
