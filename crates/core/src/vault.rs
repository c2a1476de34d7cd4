//! The vault: seals secrets before they are stored, and opens them again. The vault stores nothing and
//! draws no random numbers: the caller passes each nonce in.
//!
//! A [`Sealed`] value names the key it was sealed with. Its [`SealContext`] is authenticated together with
//! the value, so a value that was moved to another endpoint, tenant or purpose does not open.
//! [`crate::endpoint_secret`] defines the values that are sealed.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::digest;
use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use zeroize::Zeroizing;

use crate::key::{SourceName, Tenant};

/// The bytes of a vault key.
pub const VAULT_KEY_BYTES: usize = 32;

/// The bytes of a nonce.
pub const NONCE_BYTES: usize = 12;

/// Seals with the current key, and opens values that the current key or an old one sealed.
#[derive(Debug, Clone)]
pub struct Vault {
    current: VaultKey,
    old: Vec<VaultKey>,
}

/// A key of the vault. It cannot be printed, and the cipher wipes its memory when the last clone is dropped.
#[derive(Clone)]
pub struct VaultKey {
    id: KeyId,
    cipher: Arc<LessSafeKey>,
}

/// The public name of a vault key. The name is derived from the key and reveals nothing about the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(pub [u8; 8]);

/// The owner and the purpose of a sealed value. Every field is authenticated: a value opens only in
/// the context in which it was sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealContext<'a> {
    purpose: Purpose,
    tenant: &'a Tenant,
    owner: &'a str,
}

/// The kinds of sealed values. The number of each is part of every sealed value and never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    EndpointSecrets = 1,
    EndpointHeaders = 2,
    SourceSecrets = 3,
}

/// A sealed value: the bytes that are stored.
#[derive(Clone, PartialEq, Eq)]
pub struct Sealed(Vec<u8>);

/// Why a sealed value does not open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The vault does not hold the key. Other nodes may hold the key.
    #[error("the value is sealed with the vault key {0}, which is not configured")]
    UnknownKey(KeyId),
    /// A newer version of Hapax sealed the value.
    #[error("the value is sealed in format {0}, which this version of Hapax does not know")]
    UnknownFormat(u8),
    /// The value was changed, truncated, or moved from another endpoint, tenant or purpose.
    #[error("the sealed value is damaged, or belongs to another endpoint or tenant")]
    Damaged,
}

/// Why a text is not a vault key. The message never quotes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VaultKeyError {
    /// The text is not base64.
    #[error("is not base64")]
    NotBase64,
    /// The key has another length.
    #[error("holds {0} bytes, and a vault key has {VAULT_KEY_BYTES}")]
    WrongLength(usize),
}

/// Two keys of a vault are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the vault key {0} is configured twice")]
pub struct RepeatedKey(pub KeyId);

impl Vault {
    /// A vault that seals with `current` and also opens values that the `old` keys sealed. No two
    /// keys may be equal.
    pub fn new(current: VaultKey, old: Vec<VaultKey>) -> Result<Self, RepeatedKey> {
        let mut known = vec![current.id];
        for key in &old {
            if known.contains(&key.id) {
                return Err(RepeatedKey(key.id));
            }
            known.push(key.id);
        }
        Ok(Self { current, old })
    }

    /// Seals `plaintext` with the current key.
    ///
    /// Draw a random `nonce` for each call. A repeated nonce reveals whether two plaintexts of the same
    /// context are equal, and nothing else.
    pub fn seal(
        &self,
        context: &SealContext<'_>,
        plaintext: &[u8],
        nonce: [u8; NONCE_BYTES],
    ) -> Sealed {
        let header = Header { key: self.current.id, nonce };
        // The exact capacity: a vector that grows would leave a copy of the plaintext in freed memory.
        let mut bytes = Vec::with_capacity(HEADER_BYTES + plaintext.len() + TAG_BYTES);
        bytes.extend_from_slice(&header.to_bytes());
        bytes.extend_from_slice(plaintext);
        let tag = self
            .current
            .cipher
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(context.associated_data(&header)),
                &mut bytes[HEADER_BYTES..],
            )
            .expect("the plaintext is shorter than 64 GiB");
        bytes.extend_from_slice(tag.as_ref());
        Sealed(bytes)
    }

    /// Opens a value that was sealed in this context with one of the vault's keys.
    pub fn open(
        &self,
        context: &SealContext<'_>,
        sealed: &Sealed,
    ) -> Result<Zeroizing<Vec<u8>>, OpenError> {
        let header = sealed.header();
        let key = self.keys().find(|key| key.id == header.key);
        let key = key.ok_or(OpenError::UnknownKey(header.key))?;
        let mut plaintext = Zeroizing::new(sealed.0[HEADER_BYTES..].to_vec());
        let opened = key.cipher.open_in_place(
            Nonce::assume_unique_for_key(header.nonce),
            Aad::from(context.associated_data(&header)),
            &mut plaintext,
        );
        let length = opened.map_err(|_| OpenError::Damaged)?.len();
        plaintext.truncate(length);
        Ok(plaintext)
    }

    /// The keys that this vault can open, the current one first.
    pub fn key_ids(&self) -> impl Iterator<Item = KeyId> + '_ {
        self.keys().map(VaultKey::id)
    }

    /// The key that seals.
    pub fn current_key_id(&self) -> KeyId {
        self.current.id
    }

    /// Whether the value was sealed with a key other than the current one.
    pub fn needs_reseal(&self, sealed: &Sealed) -> bool {
        sealed.key_id() != self.current.id
    }

    fn keys(&self) -> impl Iterator<Item = &VaultKey> {
        std::iter::once(&self.current).chain(&self.old)
    }
}

impl VaultKey {
    /// Parses 32 bytes in base64, with or without padding. Whitespace around the text is ignored.
    pub fn from_base64(text: &str) -> Result<Self, VaultKeyError> {
        let bytes = KEY_BASE64.decode(text.trim()).map_err(|_| VaultKeyError::NotBase64)?;
        let bytes = Zeroizing::new(bytes);
        let key = <&[u8; VAULT_KEY_BYTES]>::try_from(&bytes[..]);
        key.map(Self::from_bytes).map_err(|_| VaultKeyError::WrongLength(bytes.len()))
    }

    /// The key with these bytes.
    pub fn from_bytes(bytes: &[u8; VAULT_KEY_BYTES]) -> Self {
        let mut hasher = digest::Context::new(&digest::SHA256);
        hasher.update(KEY_ID_DOMAIN);
        hasher.update(bytes);
        let mut id = [0; 8];
        id.copy_from_slice(&hasher.finish().as_ref()[..8]);
        let cipher = UnboundKey::new(&AES_256_GCM_SIV, bytes).expect("32 bytes are a key");
        Self { id: KeyId(id), cipher: Arc::new(LessSafeKey::new(cipher)) }
    }

    /// The public name of the key.
    pub fn id(&self) -> KeyId {
        self.id
    }
}

impl fmt::Debug for VaultKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VaultKey({})", self.id)
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

impl<'a> SealContext<'a> {
    /// The signing secrets of an endpoint.
    pub fn endpoint_secrets(tenant: &'a Tenant, endpoint_id: &'a str) -> Self {
        Self { purpose: Purpose::EndpointSecrets, tenant, owner: endpoint_id }
    }

    /// The values of an endpoint's custom headers.
    pub fn endpoint_headers(tenant: &'a Tenant, endpoint_id: &'a str) -> Self {
        Self { purpose: Purpose::EndpointHeaders, tenant, owner: endpoint_id }
    }

    /// The secrets with which a source verifies requests for a tenant.
    pub fn source_secrets(tenant: &'a Tenant, source: &'a SourceName) -> Self {
        Self { purpose: Purpose::SourceSecrets, tenant, owner: source.as_str() }
    }

    /// The header and the context, in one spelling: a length stands before each part of variable length.
    fn associated_data(&self, header: &Header) -> Vec<u8> {
        let mut bytes = header.to_bytes().to_vec();
        bytes.push(self.purpose as u8);
        for part in [self.tenant.as_str(), self.owner] {
            bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
            bytes.extend_from_slice(part.as_bytes());
        }
        bytes
    }
}

impl Sealed {
    /// Takes stored bytes. Only their format is checked here; [`Vault::open`] finds all other
    /// damage.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, OpenError> {
        match bytes.first() {
            Some(&FORMAT) => {}
            Some(&other) => return Err(OpenError::UnknownFormat(other)),
            None => return Err(OpenError::Damaged),
        }
        match bytes.len() < HEADER_BYTES + TAG_BYTES {
            true => Err(OpenError::Damaged),
            false => Ok(Self(bytes)),
        }
    }

    /// The bytes to store.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key that opens the value.
    pub fn key_id(&self) -> KeyId {
        self.header().key
    }

    fn header(&self) -> Header {
        let (mut key, mut nonce) = ([0; 8], [0; NONCE_BYTES]);
        key.copy_from_slice(&self.0[1..9]);
        nonce.copy_from_slice(&self.0[9..HEADER_BYTES]);
        Header { key: KeyId(key), nonce }
    }
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealed({} bytes, {})", self.0.len(), self.key_id())
    }
}

/// The start of a sealed value: the format, the key and the nonce. Ciphertext and tag follow.
struct Header {
    key: KeyId,
    nonce: [u8; NONCE_BYTES],
}

impl Header {
    fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [FORMAT; HEADER_BYTES];
        bytes[1..9].copy_from_slice(&self.key.0);
        bytes[9..].copy_from_slice(&self.nonce);
        bytes
    }
}

/// AES-256-GCM-SIV in the layout of [`Header`].
const FORMAT: u8 = 1;
const HEADER_BYTES: usize = 1 + 8 + NONCE_BYTES;
const TAG_BYTES: usize = 16;

/// Keeps the id of a key apart from every other hash of the same bytes.
const KEY_ID_DOMAIN: &[u8] = b"hapax vault key id 1\0";

const KEY_BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
