//! `[tokens.NAME]`: the tokens of the admin side, and the token that a server creates if the config has
//! none.

use std::path::{Path, PathBuf};

use hapax_core::handler::HandlerKind;
use hapax_core::limits::TOKEN_CHARS_MIN;
use hapax_core::secret::Secret;

use super::Config;
use super::document::Section;
use super::overrides::{Flags, SetAt};
use super::problem::{InvalidSetting, SettingOrigin};
use super::reader::ConfigReader;
use super::secret_file::{self, SecretKind};
use super::settings::Settings;
use super::shared::Role;
use super::sources::SourceTemplate;

/// The file in the data dir with the token of a server whose config has none.
pub(crate) const ADMIN_TOKEN_FILE: &str = "admin.token";

/// `[tokens.NAME]`.
#[derive(Debug)]
pub(crate) struct Token {
    /// The name that is recorded with every action.
    pub(crate) name: String,
    /// The bearer token.
    pub(crate) value: Secret,
    /// The permissions of the token.
    pub(crate) allow: Vec<Permission>,
}

/// One permission of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Permission {
    /// Everything; the only permission for endpoints, secrets and tenants.
    Admin,
    /// Reading.
    Read,
    /// Reading, including values that are masked for other tokens.
    Payload,
    /// Reading, and decisions about existing work: replaying, approving, rejecting, discarding, skipping,
    /// cancelling, pausing, enabling, disabling, pinging.
    Operate,
    /// Publishing messages.
    Publish,
    /// Claiming the jobs of one handler.
    Claim {
        /// The source.
        source: String,
        /// Its handler.
        handler: String,
    },
}

/// The token that a server created in this data dir, if it exists and is readable.
pub(crate) fn admin_token(data_dir: &Path) -> Option<Secret> {
    secret_file::read(&data_dir.join(ADMIN_TOKEN_FILE), SecretKind::AdminToken).ok()
}

impl Config {
    /// Whether a server with this config keeps its own token in the data directory.
    pub(crate) fn keeps_own_token(&self) -> bool {
        self.own_token.is_some()
    }

    /// Reads the server's own token, if it needs one; the first start creates it. Only servers call this,
    /// after everything else is open, so that a failed start leaves no file behind.
    pub(crate) fn take_own_token(&mut self) -> Result<(), InvalidSetting> {
        let Some(file) = &self.own_token else { return Ok(()) };
        let value = secret_file::read_or_make(file, SecretKind::AdminToken)?;
        let (name, allow) = (ADMIN_TOKEN_FILE.to_owned(), vec![Permission::Admin]);
        self.tokens = vec![Token { name, value, allow }];
        Ok(())
    }
}

impl ConfigReader<'_> {
    pub(super) fn tokens(&mut self, root: &Section<'_>) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        let Some(section) = root.get("tokens").and_then(|entry| entry.section(&mut self.problems))
        else {
            return tokens;
        };
        for entry in section.entries() {
            let Some(token) = entry.section(&mut self.problems) else { continue };
            token.expect(&["value", "allow"], &mut self.problems);
            let value = token.get("value");
            let allow = token.get("allow");
            if value.is_none() {
                let hint = "add value = \"env:HAPAX_OPS_TOKEN\"";
                token.report(InvalidSetting::new("has no value", hint), &mut self.problems);
            }
            let allow = match allow {
                Some(allow) => allow
                    .list(&mut self.problems)
                    .unwrap_or_default()
                    .iter()
                    .filter_map(|entry| entry.parse(permission, &mut self.problems))
                    .collect(),
                None => {
                    let hint = "add allow = [\"read\"], or \"operate\" or \"admin\"";
                    token.report(InvalidSetting::new("allows nothing", hint), &mut self.problems);
                    Vec::new()
                }
            };
            let Some(value_entry) = value else { continue };
            let Some(value) = self.secret(&value_entry) else { continue };
            if value.expose().chars().count() < TOKEN_CHARS_MIN {
                let invalid = InvalidSetting::new(
                    format!("is shorter than {TOKEN_CHARS_MIN} characters and can be guessed"),
                    "make one with `openssl rand -hex 32`",
                );
                value_entry.report(invalid, &mut self.problems);
                continue;
            }
            if let Some(other) = tokens.iter().find(|token| token.value == value) {
                let invalid = InvalidSetting::new(
                    format!("has the same value as tokens.{}", other.name),
                    "give each token its own value: actions are recorded under the token's name",
                );
                value_entry.report(invalid, &mut self.problems);
                continue;
            }
            tokens.push(Token { name: entry.name().to_owned(), value, allow });
        }
        tokens
    }

    /// Reports an admin side that is not on loopback and has no token, or is open.
    pub(super) fn check_admin_access(
        &mut self,
        root: &Section<'_>,
        flags: &Flags,
        settings: &Settings,
        tokens: &[Token],
    ) {
        if settings.admin_listen.ip().is_loopback() {
            return;
        }
        if settings.admin_open
            && let Some(SetAt { origin, key }) = self.set_at(root, flags, "admin_open")
        {
            let invalid = InvalidSetting::new(
                format!("is only for loopback, and admin_listen is {}", settings.admin_listen),
                "remove admin_open, or set admin_listen to an address such as 127.0.0.1:8081",
            );
            self.problems.add(origin, key, invalid);
        }
        if !tokens.is_empty() {
            return;
        }
        let invalid = InvalidSetting::new(
            format!("{} is not loopback, and no token is configured", settings.admin_listen),
            "add [tokens.ops] with value = \"env:HAPAX_OPS_TOKEN\" and allow = [\"admin\"], \
             or listen on 127.0.0.1",
        );
        let given = self.set_at(root, flags, "admin_listen");
        let SetAt { origin, key } =
            given.unwrap_or(SetAt { origin: SettingOrigin::Whole, key: "admin_listen" });
        self.problems.add(origin, key, invalid);
    }

    /// The file of the server's own token, if the config has no tokens.
    pub(super) fn own_token(&mut self, settings: &Settings, tokens: &[Token]) -> Option<PathBuf> {
        let is_needed =
            tokens.is_empty() && !settings.admin_open && settings.roles.has(Role::Admin);
        let file = is_needed.then(|| settings.data_dir.join(ADMIN_TOKEN_FILE));
        self.watched.extend(file.clone());
        file
    }

    /// Warns of tokens for handlers that no worker can claim from.
    pub(super) fn check_claim_tokens(&mut self, tokens: &[Token], sources: &[SourceTemplate]) {
        for token in tokens {
            for permission in &token.allow {
                let Permission::Claim { source, handler } = permission else { continue };
                if !is_pulled(sources, source, handler) {
                    self.warnings.push(format!(
                        "[tokens.{}]: claim:{source}/{handler} matches no handler with pull = true",
                        token.name
                    ));
                }
            }
        }
    }
}

/// Whether a handler of that name has `pull = true`.
fn is_pulled(sources: &[SourceTemplate], source: &str, handler: &str) -> bool {
    let of_source = sources.iter().filter(|one| one.spec.name.as_str() == source);
    of_source
        .flat_map(|one| &one.handlers)
        .any(|one| one.name.as_str() == handler && matches!(one.kind, HandlerKind::Pull))
}

fn permission(text: &str) -> Result<Permission, InvalidSetting> {
    match text {
        "admin" => return Ok(Permission::Admin),
        "read" => return Ok(Permission::Read),
        "payload" => return Ok(Permission::Payload),
        "operate" => return Ok(Permission::Operate),
        "publish" => return Ok(Permission::Publish),
        _claim_or_unknown => {}
    }
    let claim = text.strip_prefix("claim:").and_then(|claim| claim.split_once('/'));
    match claim {
        Some((source, handler)) if !source.is_empty() && !handler.is_empty() => {
            Ok(Permission::Claim { source: source.to_owned(), handler: handler.to_owned() })
        }
        Some(_) | None => Err(InvalidSetting::new(
            format!("\"{text}\" is not a permission"),
            "write \"admin\", \"read\", \"payload\", \"operate\", \"publish\" or \
             \"claim:SOURCE/HANDLER\"",
        )),
    }
}
