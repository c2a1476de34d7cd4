//! The database server: its URL with TLS, the facts that it reports, and the checks before it is used.

use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::SslMode;
use tokio_postgres_rustls::MakeRustlsConnect;
use uuid::Uuid;

use super::connect::{
    CONNECT_MAX, ClientPool, PgError, PgOpenError, PooledClient, StatementTimeouts, error_text,
};
use super::hosts::Hosts;
use super::tls;

/// The oldest server that is accepted.
const VERSION_MIN: i32 = 150_000;

/// Facts that a server reports about itself.
#[derive(Debug)]
pub(super) struct ServerFacts {
    pub(super) version: String,
    pub(super) is_standby: bool,
    pub(super) clock_apart: Duration,
}

/// The address of the database, and the TLS settings of its connections.
#[derive(Clone)]
pub(super) struct ServerAddress {
    pub(super) config: Config,
    pub(super) hosts: Hosts,
}

impl ServerAddress {
    /// Parses a URL or a `key=value` string. `sslmode` may also be `verify-ca` or `verify-full`,
    /// and `sslrootcert` names a file of trusted certificates: the driver knows neither.
    pub(super) fn parse(url: &str) -> Result<Self, PgOpenError> {
        let (plain, mode, roots) = without_tls(url)?;
        let mut config: Config = plain.parse().map_err(|error: tokio_postgres::Error| {
            let cause = std::error::Error::source(&error);
            PgOpenError::Url(cause.map_or_else(|| error.to_string(), ToString::to_string))
        })?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(PgOpenError::Url("names no host".to_owned()));
        }
        config.ssl_mode(match mode {
            tls::TlsMode::Disable => SslMode::Disable,
            tls::TlsMode::Prefer => SslMode::Prefer,
            tls::TlsMode::Require | tls::TlsMode::VerifyCa | tls::TlsMode::VerifyFull => {
                SslMode::Require
            }
        });
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_MAX);
        }
        // A peer that vanished is noticed before a lease ends.
        config.keepalives(true);
        config.keepalives_idle(Duration::from_secs(5));
        config.keepalives_interval(Duration::from_secs(2));
        config.keepalives_retries(3);
        let tls = tls::client(mode, roots.as_deref()).map_err(PgOpenError::Url)?;
        let hosts = Hosts::new(tls.map(MakeRustlsConnect::new), CONNECT_MAX);
        Ok(Self { config, hosts })
    }

    /// Facts that the server reports, whether or not a node would use it. The database's clock is
    /// compared with this machine's clock at half the duration of the query. So the difference is
    /// accurate to about half that duration.
    pub(super) async fn facts(&self) -> Result<ServerFacts, PgOpenError> {
        let client_pool = ClientPool::new(self, "hapax-look", 1, StatementTimeouts::WORK)?;
        let mut pooled_client =
            client_pool.checkout().await.map_err(|error| unreachable_server(&error))?;
        let asked = std::time::Instant::now();
        let sql =
            "SELECT current_setting('server_version'), pg_is_in_recovery(), clock_timestamp()";
        let rows =
            pooled_client.query(sql, &[]).await.map_err(|error| unreachable_server(&error))?;
        let halfway = std::time::SystemTime::now() - asked.elapsed() / 2;
        let row = rows.first().ok_or_else(|| {
            PgOpenError::Connect("the server does not report its settings".to_owned())
        })?;
        let theirs: std::time::SystemTime = row.get(2);
        let clock_apart = theirs.duration_since(halfway).unwrap_or_else(|behind| behind.duration());
        Ok(ServerFacts { version: row.get(0), is_standby: row.get(1), clock_apart })
    }

    /// The first column of each row of a query. The query runs without a prepared statement, so
    /// that every type is returned as text, including types of the user.
    pub(super) async fn first_column(&self, sql: &str) -> Result<Vec<Option<String>>, PgOpenError> {
        let client_pool = ClientPool::new(self, "hapax-probe", 1, StatementTimeouts::WORK)?;
        let mut pooled_client =
            client_pool.checkout().await.map_err(|error| unreachable_server(&error))?;
        pooled_client.batch("BEGIN READ ONLY").await.map_err(|error| unreachable_server(&error))?;
        let connection = pooled_client.raw().map_err(|error| unreachable_server(&error))?;
        // The database's message is for the author of the query; it contains nothing from outside.
        let messages = connection.simple_query(sql).await.map_err(|error| {
            let words = error.as_db_error().map(|db| db.message().to_owned());
            PgOpenError::Query(words.unwrap_or_else(|| error_text(&error)))
        })?;
        let row = |message: tokio_postgres::SimpleQueryMessage| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => {
                Some(row.try_get(0).ok()?.map(str::to_owned))
            }
            _other => None,
        };
        Ok(messages.into_iter().filter_map(row).collect())
    }

    /// Checks that this server can keep the guarantees of Hapax.
    pub(super) async fn check(&self) -> Result<(), PgOpenError> {
        let first = ClientPool::new(self, "hapax-start", 1, StatementTimeouts::WORK)?;
        let second = ClientPool::new(self, "hapax-start", 1, StatementTimeouts::WORK)?;
        let mut pooled_client =
            first.checkout().await.map_err(|error| unreachable_server(&error))?;
        let row = pooled_client
            .raw()
            .map_err(|error| unreachable_server(&error))?
            .simple_query(
                "SELECT current_setting('server_version_num'), pg_is_in_recovery(), \
                 current_setting('fsync'), current_setting('server_encoding'), \
                 current_setting('transaction_read_only')",
            )
            .await
            .map_err(|error| PgOpenError::Connect(error_text(&error)))?;
        let said = row.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => {
                Some((0..5).map(|n| row.get(n).unwrap_or("").to_owned()).collect::<Vec<_>>())
            }
            _ => None,
        });
        let Some(said) = said else {
            return Err(PgOpenError::Connect("the server does not report its settings".to_owned()));
        };
        let unfit = |why: String| Err(PgOpenError::Unfit(why));
        if said[0].parse::<i32>().unwrap_or(0) < VERSION_MIN {
            return unfit(format!(
                "its version is {}; 15 is the oldest supported one",
                said[0].parse::<i32>().unwrap_or(0) / 10_000
            ));
        }
        if said[1] != "f" {
            return unfit("it is a standby (in recovery); connect to the primary".to_owned());
        }
        if said[2] != "on" {
            return unfit(
                "fsync is off, so it can lose acknowledged commits; set fsync = on".to_owned(),
            );
        }
        if said[3] != "UTF8" {
            return unfit(format!("the database's encoding is {}; it must be UTF8", said[3]));
        }
        if said[4] != "off" {
            return unfit("it accepts no writes (default_transaction_read_only)".to_owned());
        }
        probe_sessions(pooled_client, &second).await
    }
}

/// Detects a pooler that sends a session's statements to changing servers: settings, prepared
/// statements and locks of a session would be lost. One session sets a value, another keeps a
/// server busy with a transaction, and the first reads its value. Behind such a pooler, the first
/// session then reaches another server, or waits for one.
async fn probe_sessions(mut first: PooledClient, second: &ClientPool) -> Result<(), PgOpenError> {
    let pooled = || {
        PgOpenError::Unfit(
            "a pooler in transaction or statement mode (PgBouncer?) is in front of it; \
             connect to the server directly, or to a pool with pool_mode = session"
                .to_owned(),
        )
    };
    let token = Uuid::now_v7().to_string();
    let client = first.raw().map_err(|error| unreachable_server(&error))?;
    let set = format!("SELECT set_config('hapax.probe', '{token}', false)");
    client.simple_query(&set).await.map_err(|error| PgOpenError::Connect(error_text(&error)))?;
    // If the pooler gives this node only one server, the second connection waits until its timeout,
    // and the check fails.
    let Ok(mut other) = second.checkout().await else {
        return Err(pooled());
    };
    let began = other.raw().map_err(|error| unreachable_server(&error))?.batch_execute("BEGIN");
    match tokio::time::timeout(CONNECT_MAX, began).await {
        Ok(Ok(())) => {}
        Ok(Err(_)) | Err(_) => return Err(pooled()),
    }
    let asked = client.simple_query("SELECT current_setting('hapax.probe', true)");
    let answer = tokio::time::timeout(CONNECT_MAX, asked).await;
    let same = matches!(answer, Ok(Ok(messages)) if messages.iter().any(|message| {
        matches!(message, tokio_postgres::SimpleQueryMessage::Row(row)
            if row.get(0) == Some(token.as_str()))
    }));
    // Both connections are closed, and with them the transaction, because this check has changed
    // their sessions.
    if same { Ok(()) } else { Err(pooled()) }
}

fn unreachable_server(error: &PgError) -> PgOpenError {
    PgOpenError::Connect(error.to_string())
}

/// Takes the TLS settings out of a URL or a `key=value` string.
fn without_tls(url: &str) -> Result<(String, tls::TlsMode, Option<PathBuf>), PgOpenError> {
    let is_url = url.starts_with("postgres://") || url.starts_with("postgresql://");
    let (head, settings, between) = if is_url {
        let (head, query) = url.split_once('?').unwrap_or((url, ""));
        (head.to_owned(), query.split('&').collect::<Vec<_>>(), "&")
    } else {
        (String::new(), url.split_whitespace().collect(), " ")
    };
    let (mut mode, mut roots) = (tls::TlsMode::Prefer, None);
    let mut rest = Vec::new();
    for setting in settings.into_iter().filter(|setting| !setting.is_empty()) {
        let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
        let value = decoded(value.trim_matches('\''));
        match name {
            "sslmode" => {
                mode = tls::TlsMode::from_word(&value).ok_or_else(|| {
                    PgOpenError::Url(format!(
                        "sslmode = {value:?} is not one of disable, prefer, require, verify-ca, \
                         verify-full"
                    ))
                })?;
            }
            "sslrootcert" => roots = Some(PathBuf::from(value)),
            _ => rest.push(setting),
        }
    }
    let plain = match (is_url, rest.is_empty()) {
        (true, true) => head,
        (true, false) => format!("{head}?{}", rest.join(between)),
        (false, _) => rest.join(between),
    };
    Ok((plain, mode, roots))
}

/// Decodes percent escapes; invalid ones stay as they are.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        out.push(escaped.unwrap_or(bytes[at]));
        at += if escaped.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tls_settings_of_a_url_are_removed_and_the_rest_stays() {
        // A setting that the driver does not know would make it refuse the whole URL.
        let check = |url: &str, plain: &str, mode: tls::TlsMode, roots: Option<&str>| {
            let (got, got_mode, got_roots) = without_tls(url).expect("reads");
            let roots = roots.map(PathBuf::from);
            assert_eq!((got.as_str(), got_mode, got_roots), (plain, mode, roots), "{url}");
        };
        check("postgres://u:p@h/db", "postgres://u:p@h/db", tls::TlsMode::Prefer, None);
        check(
            "postgres://h/db?sslmode=verify-full&connect_timeout=3&sslrootcert=%2Fca%20x.pem",
            "postgres://h/db?connect_timeout=3",
            tls::TlsMode::VerifyFull,
            Some("/ca x.pem"),
        );
        check("host=h dbname=db sslmode=require", "host=h dbname=db", tls::TlsMode::Require, None);
        assert!(without_tls("postgres://h/db?sslmode=strict").is_err());
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_password() {
        // The error is logged, and the URL contains a password.
        for url in ["postgres://u:hunter2@/", "postgres://u:hunter2@h:no/db", "hunter2", ""] {
            let error = ServerAddress::parse(url).err().map(|error| error.to_string());
            let error = error.unwrap_or_else(|| panic!("{url} was accepted"));
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
