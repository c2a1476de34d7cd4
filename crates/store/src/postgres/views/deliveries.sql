-- Nothing is sent yet: this view has its final columns and no rows.
CREATE OR REPLACE VIEW hapax.deliveries AS
SELECT NULL::uuid AS id, NULL::text AS message, NULL::text AS endpoint, NULL::text AS status,
       NULL::integer AS attempt, NULL::timestamptz AS created_at, NULL::timestamptz AS delivered_at
WHERE false;
