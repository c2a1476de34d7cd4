-- Keeps: one answer per fence. KEYS: the reservation, and where its caller's keys are counted.
-- ARGV: fence; status, headers, body and size of the answer; the most bytes of the caller (or -1);
-- and the substitute if the answer has no room, in the same four parts.
local kept = redis.call('HMGET', KEYS[1], 'fence', 'status', 'ttl', 'owner')
if kept[1] ~= ARGV[1] or kept[2] then
    return 0
end
local first = 2
if kept[4] and tonumber(ARGV[6]) >= 0 and not has_room(kept[4], nil, tonumber(ARGV[6])) then
    first = 7
end
redis.call('HSET', KEYS[1],
    'status', ARGV[first], 'headers', ARGV[first + 1], 'body', ARGV[first + 2])
redis.call('PEXPIRE', KEYS[1], kept[3])
if kept[4] then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local ttl = tonumber(kept[3])
    note(KEYS[1], kept[4], tonumber(ARGV[first + 3]), now + ttl, ttl)
end
return 1
