-- Nothing was done for it: the key is free, if this fence still holds it. KEYS: the reservation.
-- ARGV: fence.
local kept = redis.call('HMGET', KEYS[1], 'fence', 'status')
if kept[1] == ARGV[1] and not kept[2] then
    redis.call('DEL', KEYS[1])
end
