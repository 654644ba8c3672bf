//! What a source is, as the node plugin hands it over and the operator renders it.
//!
//! The JSON is hostile until [`SourceConfig::parse`] accepted it. `Debug` never shows a secret.

use std::fmt;

use serde::{Deserialize, Serialize};
use url::Url;

use crate::{Failure, Reason};

/// Longest configuration accepted: a CA bundle of a few certificates fits many times.
const MAX_CONFIG_BYTES: usize = 1 << 20;

/// A dataset's source: exactly one of an S3 prefix and a path in a storage cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SourceConfig {
    /// Objects under a prefix of a bucket, or one object.
    S3(S3Config),
    /// Files under a path of our own store.
    Cluster(ClusterConfig),
}

/// An S3 prefix and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct S3Config {
    /// `s3://bucket/prefix` or `s3://bucket/object.vortex`.
    pub uri: String,
    /// `https://host[:port]`, or `http://` for a server without TLS.
    pub endpoint: String,
    /// Region that requests are signed for.
    #[serde(default = "default_region")]
    pub region: String,
    /// Bucket in the path (true) or in the host name (false).
    #[serde(default = "default_path_style")]
    pub path_style: bool,
    /// PEM certificates trusted besides the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_bundle: Option<String>,
    /// None reads anonymously.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<Credentials>,
}

/// A path in a storage cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClusterConfig {
    /// `host:port` of the cluster's manager.
    pub manager: String,
    /// Absolute path of a directory or a file in the store.
    pub path: String,
}

/// An S3 key pair, by the names of the Secret's keys.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Credentials {
    /// The public half.
    pub access_key_id: String,
    /// The secret half.
    pub secret_access_key: String,
    /// For temporary credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("access_key_id", &self.access_key_id)
            .field("secret_access_key", &"redacted")
            .finish_non_exhaustive()
    }
}

impl SourceConfig {
    /// Parses and validates; the error names the field and what it should be.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        if json.len() > MAX_CONFIG_BYTES {
            return Err(ConfigError::TooLong(json.len()));
        }
        let config: Self = serde_json::from_str(json)?;
        config.validate()?;
        Ok(config)
    }

    /// Checks what the types cannot say.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::S3(s3) => s3.validate(),
            Self::Cluster(cluster) => cluster.validate(),
        }
    }
}

impl S3Config {
    /// Bucket and key prefix of the uri; the prefix has no leading or trailing slash.
    pub fn bucket_and_prefix(&self) -> Result<(&str, &str), ConfigError> {
        let bad = |why| ConfigError::Field { field: "s3.uri", why };
        let rest =
            self.uri.strip_prefix("s3://").ok_or_else(|| bad("must be s3://bucket/prefix"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let is_bucket_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if !(1..=255).contains(&bucket.len()) || !bucket.chars().all(is_bucket_char) {
            return Err(bad("has no valid bucket name after s3://"));
        }
        let prefix = prefix.trim_matches('/');
        if !prefix.is_empty() && !crate::is_plain_path(prefix) {
            return Err(bad("may not hold empty, . or .. path parts"));
        }
        Ok((bucket, prefix))
    }

    fn validate(&self) -> Result<(), ConfigError> {
        self.bucket_and_prefix()?;
        let bad = |why| ConfigError::Field { field: "s3.endpoint", why };
        let url = Url::parse(&self.endpoint).map_err(|_| bad("is not a URL"))?;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(bad("must be https://host[:port] or http://host[:port]"));
        }
        if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
            return Err(bad("may not hold credentials or a query"));
        }
        if self.region.is_empty() || self.region.len() > 64 {
            return Err(ConfigError::Field {
                field: "s3.region",
                why: "must be 1 to 64 characters",
            });
        }
        Ok(())
    }
}

impl ClusterConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        let has_port = self
            .manager
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if !has_port {
            return Err(ConfigError::Field { field: "cluster.manager", why: "must be host:port" });
        }
        let inside = self.path.strip_prefix('/');
        if !inside.is_some_and(|rest| rest.is_empty() || crate::is_plain_path(rest)) {
            return Err(ConfigError::Field {
                field: "cluster.path",
                why: "must be absolute, without empty, . or .. parts",
            });
        }
        Ok(())
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON of the right shape.
    #[error("parse source: {0}")]
    Json(#[from] serde_json::Error),
    /// A field with a value that cannot work.
    #[error("source field {field} {why}")]
    Field {
        /// Dotted name.
        field: &'static str,
        /// What it should be.
        why: &'static str,
    },
    /// More text than any configuration has.
    #[error("source of {0} bytes is longer than 1 MiB")]
    TooLong(usize),
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::new(Reason::StoreUnavailable, error.to_string())
    }
}

fn default_region() -> String {
    "us-east-1".into()
}

fn default_path_style() -> bool {
    true
}

/// Fuzz target: no input may panic, and what is accepted must survive a round trip.
pub fn fuzz_source_config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(config) = SourceConfig::parse(text) {
        let again = serde_json::to_string(&config).map(|json| SourceConfig::parse(&json));
        assert!(matches!(again, Ok(Ok(same)) if same == config));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S3: &str = r#"{"s3":{"uri":"s3://train/flights","endpoint":"https://s3.local:7070",
        "region":"eu-1","pathStyle":true,"caBundle":null,
        "credentials":{"accessKeyId":"AKIA1","secretAccessKey":"hush-hush"}}}"#;

    #[test]
    fn both_kinds_parse_and_keep_their_fields() {
        let SourceConfig::S3(s3) = SourceConfig::parse(S3).unwrap() else { panic!("not s3") };
        assert_eq!(s3.bucket_and_prefix().unwrap(), ("train", "flights"));
        assert_eq!(s3.region, "eu-1");
        let cluster = r#"{"cluster":{"manager":"train-meta.storage.svc:9000","path":"/d/x"}}"#;
        assert_eq!(
            SourceConfig::parse(cluster).unwrap(),
            SourceConfig::Cluster(ClusterConfig {
                manager: "train-meta.storage.svc:9000".into(),
                path: "/d/x".into(),
            })
        );
    }

    #[test]
    fn debug_output_holds_no_secret() {
        let shown = format!("{:?}", SourceConfig::parse(S3).unwrap());
        assert!(shown.contains("AKIA1"), "{shown}");
        assert!(!shown.contains("hush-hush"), "{shown}");
    }

    #[test]
    fn bad_fields_are_named() {
        let cases = [
            ("s3://train/flights", "train/flights", "s3.uri"),
            ("s3://train/flights", "s3:///x", "s3.uri"),
            ("s3://train/flights", "s3://b/../x", "s3.uri"),
            ("https://s3.local:7070", "s3.local", "s3.endpoint"),
            ("https://s3.local:7070", "ftp://x", "s3.endpoint"),
            ("https://s3.local:7070", "https://u:p@x", "s3.endpoint"),
            ("eu-1", "", "s3.region"),
        ];
        for (good, bad, field) in cases {
            let error = SourceConfig::parse(&S3.replace(good, bad)).unwrap_err();
            assert!(error.to_string().contains(field), "{bad}: {error}");
        }
        for (manager, path) in [("host", "/x"), (":9000", "/x"), ("h:9000", "x"), ("h:1", "/a/..")]
        {
            let json = format!(r#"{{"cluster":{{"manager":"{manager}","path":"{path}"}}}}"#);
            assert!(SourceConfig::parse(&json).is_err(), "{json}");
        }
    }

    #[test]
    fn two_sources_or_an_unknown_field_are_refused() {
        assert!(SourceConfig::parse("{}").is_err());
        assert!(SourceConfig::parse(&S3.replace("\"region\"", "\"regoin\"")).is_err());
    }
}
