-- Records a failed attempt: the retry follows the job's schedule, or comes after exactly
-- `retry_in`.
CREATE OR REPLACE FUNCTION hapax.fail(job uuid, fence bigint, error text, retry_in interval DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF fail.job IS NULL OR fail.fence IS NULL THEN
        RAISE EXCEPTION 'hapax.fail: job and fence must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF fail.retry_in < interval '0' OR fail.retry_in > interval '1 year' THEN
        RAISE EXCEPTION 'hapax.fail: retry_in must be between 0 and a year'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF hapax.failed(
        fail.job, fail.fence, coalesce(fail.error, 'failed'),
        CASE WHEN fail.retry_in IS NULL THEN 0 ELSE 2 END,
        coalesce(extract(epoch FROM fail.retry_in) * 1000000, 0)::bigint, random()) = 0
    THEN
        RAISE EXCEPTION 'job % is not held under fence % any more', fail.job, fail.fence
            USING ERRCODE = 'XH001';
    END IF;
END $$;
