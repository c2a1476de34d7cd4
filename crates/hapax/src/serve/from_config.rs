//! The settings of each part of the server, made from the configuration at the start and at a reload.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;

use hapax_core::handler::Handler;
use hapax_core::presets::{self, RetrySchedule};
use hapax_core::search::SearchFields;
use hapax_core::secret::Secret;
use hapax_core::{SourceName, Timestamp};
use hapax_engine::limits::BodyLimits;
use hapax_engine::{
    GuardRules, LaneSpec, Outbound, ProxySpec, Retention, RouteSpec, Routes, RoutesSpec, SenderKeys,
};
use hapax_layer::{IdempotencyRules, Principal};
use hapax_store::{PgOptions, SqliteOptions};

use crate::admin::WithoutToken;
use crate::config::{
    self, CallerIdentity, Config, Keep, Permission, Redaction, ServiceUrl, SourceTemplate,
};

/// The options of the store in a directory.
pub(super) fn sqlite_options(config: &Config) -> SqliteOptions {
    let mut options = SqliteOptions::new(&config.settings.data_dir);
    options.max_body = config.settings.max_body_bytes;
    options
}

/// The options of the shared database.
pub(super) fn postgres_options(config: &Config, url: &ServiceUrl) -> PgOptions {
    let mut options = PgOptions::new(url.expose());
    let handlers = config.settings.handlers_database_url.as_ref();
    options.handlers_url = handlers.map(|url| url.expose().to_owned());
    options.redis_url = config.settings.redis_url.as_ref().map(|url| url.expose().to_owned());
    options.keys_kept = config.keys_kept();
    options
}

pub(super) fn routes(config: &Config, public_address: SocketAddr) -> anyhow::Result<Routes> {
    Ok(Routes::build(RoutesSpec {
        public_url: public_url(config, public_address),
        trusted_proxies: config.settings.trusted_proxies.clone(),
        body: BodyLimits {
            bytes_max: config.settings.max_body_bytes,
            deadline: config.settings.body_timeout,
            ..BodyLimits::default()
        },
        sources: route_specs(config),
    })?)
}

/// The beginning of the addresses that senders post to. With port 0 only the listener knows the
/// port.
pub(super) fn public_url(config: &Config, public_address: SocketAddr) -> String {
    match (&config.dev, &config.settings.public_url) {
        (None, Some(url)) => url.clone(),
        (Some(_), _) | (None, None) => format!("http://{public_address}"),
    }
}

fn route_specs(config: &Config) -> Vec<RouteSpec> {
    config
        .sources
        .iter()
        .map(|configured| RouteSpec {
            source: Arc::clone(&configured.source),
            rate_limit: configured.rate_limit,
            unverified_limit: configured.unverified_limit,
            handlers: configured.handlers.clone(),
            mode: configured.mode,
        })
        .collect()
}

/// Every handler once, including handlers of a source without a tenant in the config.
pub(super) fn lanes(config: &Config) -> Vec<LaneSpec> {
    let lane = |template: &SourceTemplate, handler: &Arc<Handler>| {
        let sources = config.sources.iter().map(|configured| &configured.source);
        LaneSpec {
            handler: Arc::clone(handler),
            source: template.spec.name.clone(),
            verifiers: sources.filter(|it| *it.name() == template.spec.name).cloned().collect(),
        }
    };
    let mut lanes = Vec::new();
    for template in &config.templates {
        lanes.extend(template.handlers.iter().map(|handler| lane(template, handler)));
    }
    lanes
}

/// The sources of the configuration, those without a tenant or handler included.
pub(super) fn source_names(config: &Config) -> HashSet<SourceName> {
    config.templates.iter().map(|template| template.spec.name.clone()).collect()
}

/// Fetches keys of senders at public addresses, through the proxy of deliveries if there is one. No other
/// permission for endpoints applies to these fetches.
pub(super) fn sender_keys(config: &Config) -> anyhow::Result<SenderKeys> {
    let rules = GuardRules::new(Vec::new(), vec![443], config.settings.outbound.proxy.clone());
    Ok(SenderKeys::new(Outbound::guarded(rules)?))
}

pub(super) fn proxy_spec(config: &Config, proxy: &config::Proxy) -> ProxySpec {
    let rules = IdempotencyRules::default()
        .required(proxy.require_key.iter().cloned())
        .ttl(proxy.ttl)
        .wait(proxy.wait)
        .mismatch_status(proxy.mismatch_status)
        .quota(Some(proxy.quota))
        .fingerprint_ignore(proxy.fingerprint_ignore.clone())
        .body_max(config.settings.max_body_bytes);
    let rules = match &proxy.scope {
        CallerIdentity::Default => rules,
        CallerIdentity::Header(name) => rules.principal(Principal::Header(name.clone())),
        CallerIdentity::Jwt(claim, keys) => rules.principal(Principal::Jwt {
            claim: claim.clone(),
            keys: Arc::clone(keys),
            now: Arc::new(Timestamp::now),
        }),
        CallerIdentity::UnverifiedJwt(claim) => {
            rules.principal(Principal::UnverifiedJwt(claim.clone()))
        }
        CallerIdentity::Shared => rules.principal(Principal::Shared),
    };
    ProxySpec {
        upstream: proxy.upstream.clone(),
        rules,
        lease: proxy.lease,
        body_timeout: config.settings.body_timeout,
        trusted_proxies: config.settings.trusted_proxies.clone(),
    }
}

pub(super) fn retention(config: &Config) -> Retention {
    let span = |keep| match keep {
        Keep::Forever => None,
        Keep::For(span) => Some(span),
    };
    let retention = &config.settings.retention;
    let sources = config.templates.iter();
    let keys = sources.map(|one| (one.spec.name.clone(), span(one.keep_keys)));
    let message_ids = retention.keys.map_or(Some(hapax::limits::KEEP_DEFAULT), span);
    let deliveries = span(retention.deliveries);
    Retention { message_ids, deliveries, ..Retention::new(span(retention.events), keys) }
}

pub(super) fn tokens(config: &Config) -> impl Iterator<Item = (&str, &Secret, &[Permission])> {
    config.tokens.iter().map(|token| (&*token.name, &token.value, &*token.allow))
}

pub(super) fn without_token(config: &Config) -> WithoutToken {
    match config.settings.admin_open || config.dev.is_some() {
        true => WithoutToken::FromLoopback,
        false => WithoutToken::Refused,
    }
}

/// The values that each source masks.
pub(super) fn redacted(config: &Config) -> impl Iterator<Item = (String, Redaction)> {
    config.templates.iter().map(|one| (one.spec.name.to_string(), one.redact.clone()))
}

/// The values that each source names in `search`.
pub(super) fn search_fields(config: &Config) -> SearchFields {
    SearchFields::new(
        config.templates.iter().map(|one| (one.spec.name.clone(), one.search.clone())),
    )
}

/// The retry schedules that the senders of the sources document.
pub(super) fn retry_schedules(config: &Config) -> HashMap<String, RetrySchedule> {
    let schedule = |one: &SourceTemplate| {
        let schedule = presets::find(&one.spec.provider)?.schedule?;
        Some((one.spec.name.to_string(), schedule))
    };
    config.templates.iter().filter_map(schedule).collect()
}
