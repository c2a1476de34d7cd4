-- Keeps: one attempt runs at a time per key, and one answer is stored. KEYS: the reservation. ARGV:
-- fingerprint, lease and ttl in milliseconds; owner (empty without a quota), its most keys and
-- bytes. The time is Redis's own. The fence is that time in microseconds, and always above the last
-- one. A counter would restart in a flushed Redis and issue an old fence again. The clock of Redis
-- must not be set back.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local kept = redis.call('HMGET', KEYS[1],
    'print', 'fence', 'attempt', 'until', 'status', 'headers', 'body')
if kept[1] then
    if kept[1] ~= ARGV[1] then
        return {'mismatch', false, false, false, false}
    elseif kept[5] then
        return {'replay', tonumber(kept[5]), false, kept[6], kept[7]}
    elseif tonumber(kept[4]) > now then
        return {'in_progress', tonumber(kept[4]) - now, false, false, false}
    end
end
local owner = ARGV[4]
if owner ~= '' and not kept[1] then
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 100)) do
        take_off(name)
    end
    if not has_room(owner, tonumber(ARGV[5]), tonumber(ARGV[6])) then
        return {'over_quota', false, false, false, false}
    end
end
local fence = time[1] * 1000000 + time[2]
if kept[2] and tonumber(kept[2]) >= fence then
    fence = tonumber(kept[2]) + 1
end
local attempt = (tonumber(kept[3]) or 0) + 1
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'print', ARGV[1], 'fence', string.format('%.0f', fence),
    'attempt', attempt, 'until', string.format('%.0f', now + ARGV[2]), 'ttl', ARGV[3])
-- A running reservation is stored for at least as long as its lease.
local known_for = math.max(tonumber(ARGV[2]), tonumber(ARGV[3]))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', known_for))
if owner ~= '' then
    redis.call('HSET', KEYS[1], 'owner', owner)
    note(KEYS[1], owner, 0, now + known_for, known_for)
end
return {'fresh', fence, attempt, false, false}
