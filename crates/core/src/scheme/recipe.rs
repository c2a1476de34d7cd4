//! Descriptions of how senders sign: plain data, which [`super::Scheme`] compiles together with the
//! keys.

/// How a sender authenticates its requests.
#[derive(Debug, Clone, Copy)]
pub enum Recipe {
    /// A signature over composed content, carried in headers.
    Composed(ComposedSignature<'static>),
    /// The same signature under alternative header names. The first set that has a header in the request
    /// applies. A header of another set therefore cannot accompany a signature that does not cover it.
    AlternativeNames(&'static [ComposedSignature<'static>]),
    /// The form of the secret selects one of two schemes. The request never does.
    BySecret {
        /// The prefix of secrets that select `with`.
        prefix: &'static str,
        /// The scheme for secrets with the prefix.
        with: &'static Recipe,
        /// The scheme for all other requests.
        without: &'static Recipe,
    },
    /// A parameter of the source selects one of several schemes.
    ByParam {
        /// The parameter's name.
        param: &'static str,
        /// Its values; the first is the default.
        choices: &'static [(&'static str, Recipe)],
    },
    /// HMAC-SHA1 over the URL and the sorted form fields, or over a URL that carries the body's digest.
    Twilio,
    /// One HMAC in every item of the body.
    Adyen,
    /// An HMAC in the body that covers a timestamp and a token, and nothing else.
    Mailgun,
    /// RSA by a certificate over header fields and the body's CRC-32.
    PayPal,
    /// A JWT in a header that names the body's digest.
    Plaid,
    /// A shared token in a header: nothing is signed.
    Token {
        /// The header.
        header: &'static str,
        /// The text before the token.
        prefix: &'static str,
    },
    /// HTTP Basic credentials: nothing is signed.
    Basic,
}

/// A signature over composed content. A recipe borrows its text, because the config can describe one too.
#[derive(Debug, Clone, Copy)]
pub struct ComposedSignature<'a> {
    /// The algorithm.
    pub algorithm: SignatureAlgorithm,
    /// The form of the secret.
    pub key: KeyForm,
    /// The headers that carry the signatures.
    pub carrier: Carrier<'a>,
    /// The signed content: text with `{body}`, `{timestamp}`, `{url}`, `{method}`, `{header:NAME}`, and
    /// `{sorted_url}` for Plivo's sorted form.
    pub content: &'a str,
    /// The location of the signed timestamp.
    pub time: Option<Time<'a>>,
    /// Headers that must have exactly this value.
    pub fixed: &'a [(&'a str, Fixed<'a>)],
}

/// A signature algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignatureAlgorithm {
    /// HMAC with SHA-1.
    HmacSha1,
    /// HMAC with SHA-256.
    HmacSha256,
    /// HMAC with SHA-512.
    HmacSha512,
    /// Plain SHA-1 over content and secret.
    Sha1WithSuffix,
    /// Plain SHA-256 over content and secret.
    Sha256WithSuffix,
    /// Ed25519; the secret is the sender's public key.
    Ed25519,
    /// ECDSA on P-256 with SHA-256, signatures in DER; the secret is the sender's public key.
    EcdsaP256,
}

impl SignatureAlgorithm {
    /// Its common name.
    pub fn title(self) -> &'static str {
        match self {
            Self::HmacSha1 => "HMAC-SHA1",
            Self::HmacSha256 => "HMAC-SHA256",
            Self::HmacSha512 => "HMAC-SHA512",
            Self::Sha1WithSuffix => "SHA-1 with the secret at the end",
            Self::Sha256WithSuffix => "SHA-256 with the secret at the end",
            Self::Ed25519 => "Ed25519",
            Self::EcdsaP256 => "ECDSA P-256 with SHA-256",
        }
    }

    /// Whether the key that verifies can also sign.
    pub fn is_symmetric(self) -> bool {
        match self {
            Self::HmacSha1
            | Self::HmacSha256
            | Self::HmacSha512
            | Self::Sha1WithSuffix
            | Self::Sha256WithSuffix => true,
            Self::Ed25519 | Self::EcdsaP256 => false,
        }
    }
}

/// How a secret is written in the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyForm {
    /// Its UTF-8 bytes are the key.
    Text,
    /// Text in which the sender decodes HTML entities before use.
    HtmlText,
    /// Hexadecimal, either case.
    Hex,
    /// Base64.
    Base64,
    /// Base64, with or without this prefix.
    Base64After(&'static str),
    /// Base64 after this prefix, which is required.
    Base64Only(&'static str),
    /// Base64 after this prefix; without the prefix, text.
    Base64OrText(&'static str),
    /// Base64 after the last `_`.
    Base64AfterLastUnderscore,
}

/// How headers carry signatures.
#[derive(Debug, Clone, Copy)]
pub enum Carrier<'a> {
    /// One signature in one header.
    Header {
        /// The header.
        name: &'a str,
        /// The text before the signature.
        prefix: &'a str,
        /// The encoding.
        encoding: Encoding,
    },
    /// `t=1,v1=…,v1=…`: a timestamp and any number of signatures.
    Pairs {
        /// The header.
        name: &'a str,
        /// The separator of pairs.
        separator: char,
        /// Whether a space may follow the separator.
        blank_after: bool,
        /// Whether signatures of another form may come before, with a space after each.
        after_others: bool,
        /// The label of the timestamp.
        time: &'a str,
        /// The label of the signatures.
        label: &'a str,
        /// The encoding.
        encoding: Encoding,
    },
    /// `v1,… v1,…`: signatures with a version, separated by spaces.
    Versions {
        /// The header.
        name: &'a str,
        /// The version that is checked.
        label: &'a str,
        /// The encoding.
        encoding: Encoding,
    },
    /// Signatures separated by commas.
    List {
        /// The header.
        name: &'a str,
        /// The encoding.
        encoding: Encoding,
    },
    /// `NAME-1`, `NAME-2`, …: a header for each key that the sender holds.
    Numbered {
        /// The name up to the number.
        stem: &'a str,
        /// The encoding.
        encoding: Encoding,
    },
    /// A header for each secret, in their order: the first secret signs only the first header.
    Slots {
        /// The headers.
        names: &'a [&'a str],
        /// The encoding.
        encoding: Encoding,
    },
}

/// The encoding of a signature. Only the canonical form is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Lower-case hexadecimal.
    Hex,
    /// Base64 with padding.
    Base64,
    /// Base64 for URLs, without padding.
    Base64Url,
}

/// The signed timestamp: its location and its form.
#[derive(Debug, Clone, Copy)]
pub struct Time<'a> {
    /// The location.
    pub at: TimeAt<'a>,
    /// The form.
    pub form: TimeForm,
}

/// The location of the signed timestamp.
#[derive(Debug, Clone, Copy)]
pub enum TimeAt<'a> {
    /// In a header that is part of the content.
    Header(&'a str),
    /// Beside the signatures, see [`Carrier::Pairs`].
    Pair,
    /// In the signed body, at this JSON pointer.
    Body(&'a str),
}

/// The form of a timestamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeForm {
    /// Unix seconds.
    Seconds,
    /// Unix milliseconds.
    Millis,
    /// RFC 3339.
    Rfc3339,
    /// Any of these, distinguished by shape and magnitude.
    Any,
}

/// The required value of a header.
#[derive(Debug, Clone, Copy)]
pub enum Fixed<'a> {
    /// Exactly this text.
    Text(&'a str),
    /// The value of this parameter of the source.
    Param(&'a str),
}

/// A parameter that a source must or may set in addition to its secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: &'static str,
    /// Whether it is required.
    pub required: bool,
    /// Its meaning.
    pub meaning: &'static str,
}

impl Recipe {
    /// Whether the configured key can also sign, so that `hapax sign` and `hapax send` work.
    pub fn can_sign(&self) -> bool {
        match self {
            Self::Composed(composed) => composed.algorithm.is_symmetric(),
            Self::AlternativeNames(names) => {
                names.iter().all(|composed| composed.algorithm.is_symmetric())
            }
            Self::BySecret { without, .. } => without.can_sign(),
            Self::ByParam { choices, .. } => choices.iter().all(|(_, recipe)| recipe.can_sign()),
            Self::Twilio | Self::Adyen | Self::Mailgun | Self::Token { .. } | Self::Basic => true,
            Self::PayPal | Self::Plaid => false,
        }
    }

    /// Whether the source needs at least one secret.
    pub fn needs_secret(&self) -> bool {
        match self {
            Self::PayPal => false,
            Self::Plaid
            | Self::Composed(_)
            | Self::AlternativeNames(_)
            | Self::BySecret { .. }
            | Self::ByParam { .. }
            | Self::Twilio
            | Self::Adyen
            | Self::Mailgun
            | Self::Token { .. }
            | Self::Basic => true,
        }
    }

    /// The form of its secrets. `None` without a secret, or before a choice is made.
    pub fn key_form(&self) -> Option<KeyForm> {
        match self {
            Self::Composed(composed) => Some(composed.key),
            Self::AlternativeNames(names) => names.first().map(|composed| composed.key),
            Self::Adyen => Some(KeyForm::Hex),
            Self::Twilio | Self::Mailgun | Self::Token { .. } | Self::Basic => Some(KeyForm::Text),
            // Its `secrets` hold a public id.
            Self::PayPal => None,
            Self::Plaid | Self::BySecret { .. } | Self::ByParam { .. } => None,
        }
    }

    /// Whether the full public URL is signed.
    pub fn signs_url(&self) -> bool {
        match self {
            Self::Composed(composed) => composed.content.contains("url}"),
            Self::AlternativeNames(names) => {
                names.iter().any(|composed| composed.content.contains("url}"))
            }
            Self::BySecret { with, without, .. } => with.signs_url() || without.signs_url(),
            Self::ByParam { choices, .. } => choices.iter().any(|(_, recipe)| recipe.signs_url()),
            Self::Twilio => true,
            Self::Adyen
            | Self::Mailgun
            | Self::PayPal
            | Self::Plaid
            | Self::Token { .. }
            | Self::Basic => false,
        }
    }

    /// The parameters it takes.
    pub fn params(&self) -> &'static [Param] {
        match self {
            Self::PayPal => &[
                Param {
                    name: "webhook_id",
                    required: true,
                    meaning: "the webhook's id; may be in `secrets` instead",
                },
                Param {
                    name: "cert_pem",
                    required: false,
                    meaning: "the signing certificate, with any intermediates after it; without it, Hapax \
                              fetches the one that a request names from PayPal",
                },
                Param {
                    name: "ca_pem",
                    required: false,
                    meaning: "the roots it must chain to; by default the public ones",
                },
            ],
            Self::Plaid => &[
                Param {
                    name: "client_id",
                    required: true,
                    meaning: "the client id that goes with the secret, to fetch keys from Plaid",
                },
                Param {
                    name: "environment",
                    required: false,
                    meaning: "production (the default) or sandbox: where keys are fetched",
                },
                Param {
                    name: "jwks",
                    required: false,
                    meaning: "the verification keys, a JSON array of JWKs or a key set, instead of \
                              fetching them",
                },
            ],
            Self::ByParam { param: "version", .. } => &[Param {
                name: "version",
                required: false,
                meaning: "which generation of the sender's webhooks this is",
            }],
            Self::ByParam { param: "signing", .. } => &[Param {
                name: "signing",
                required: false,
                meaning: "how the sender signs; standard covers v1 and v1a",
            }],
            Self::ByParam { .. } => &[Param {
                name: "algorithm",
                required: false,
                meaning: "the hash that the account is set to",
            }],
            Self::Composed(ComposedSignature { fixed, .. }) if fixed.iter().any(is_param) => {
                &[Param { name: "key", required: true, meaning: "the app key that goes with it" }]
            }
            Self::Composed(_)
            | Self::AlternativeNames(_)
            | Self::BySecret { .. }
            | Self::Twilio
            | Self::Adyen
            | Self::Mailgun
            | Self::Token { .. }
            | Self::Basic => &[],
        }
    }

    /// A description in one line.
    pub fn describe(&self) -> String {
        match self {
            Self::Composed(composed) => composed.describe(),
            Self::AlternativeNames(names) => {
                names.first().map(ComposedSignature::describe).unwrap_or_default()
            }
            Self::BySecret { prefix, with, without } => {
                format!(
                    "with a secret that begins with {prefix}: {}; otherwise: {}",
                    with.describe(),
                    without.describe()
                )
            }
            Self::ByParam { param, choices } => choices
                .iter()
                .map(|(value, recipe)| format!("with {param} = \"{value}\": {}", recipe.describe()))
                .collect::<Vec<_>>()
                .join("; "),
            Self::Twilio => "HMAC-SHA1 over the URL and the sorted form fields, base64, \
                             in x-twilio-signature"
                .to_owned(),
            Self::Adyen => "HMAC-SHA256 over eight fields of each item, base64, \
                            in additionalData.hmacSignature"
                .to_owned(),
            Self::Mailgun => "HMAC-SHA256 over timestamp and token, hex, \
                              in signature.signature of the body"
                .to_owned(),
            Self::PayPal => "RSA (PKCS #1 v1.5, SHA-256) by a certificate over transmission id, \
                             time, webhook id and the body's CRC-32, base64, \
                             in paypal-transmission-sig"
                .to_owned(),
            Self::Plaid => {
                "JWT (ES256) that names the body's SHA-256, in plaid-verification".to_owned()
            }
            Self::Token { header, .. } => format!("a shared token in {header}"),
            Self::Basic => "HTTP Basic credentials".to_owned(),
        }
    }
}

impl ComposedSignature<'_> {
    fn describe(&self) -> String {
        let (place, encoding) = match self.carrier {
            Carrier::Header { name, encoding, .. }
            | Carrier::Pairs { name, encoding, .. }
            | Carrier::Versions { name, encoding, .. }
            | Carrier::List { name, encoding } => (name.to_owned(), encoding),
            Carrier::Numbered { stem, encoding } => (format!("{stem}1, {stem}2, …"), encoding),
            Carrier::Slots { names, encoding } => (names.join(", "), encoding),
        };
        let encoding = match encoding {
            Encoding::Hex => "hex",
            Encoding::Base64 => "base64",
            Encoding::Base64Url => "base64url",
        };
        format!("{} over {}, {encoding}, in {place}", self.algorithm.title(), self.content)
    }
}

fn is_param((_, fixed): &(&str, Fixed<'_>)) -> bool {
    matches!(fixed, Fixed::Param(_))
}
