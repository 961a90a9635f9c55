//! Answers that are errors: `Status` bodies as the API server writes them.

use serde_json::{Value, json};

/// One reason why an object was refused (`details.causes[]`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cause {
    pub(crate) reason: &'static str,
    pub(crate) field: String,
    pub(crate) message: String,
}

impl Cause {
    fn body(&self) -> Value {
        let mut body = json!({"message": self.message});
        for (name, text) in [("reason", self.reason), ("field", &self.field)] {
            if !text.is_empty() {
                body[name] = json!(text);
            }
        }
        body
    }
}

/// An error answer.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) code: u16,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) details: Option<Value>,
    /// Seconds for the `Retry-After` header.
    pub(crate) retry_after: Option<u32>,
}

impl Failure {
    pub(crate) fn new(code: u16, message: impl Into<String>) -> Self {
        Self { code, reason: reason_of(code), message: message.into(), details: None, retry_after: None }
    }

    /// What a server whose handler panics does: it hangs up.
    pub(crate) fn hang_up() -> Self {
        Self::new(0, "the server hangs up")
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    pub(crate) fn forbidden(user: &str, verb: &str, what: &str, group: &str, name: &str, why: &str) -> Self {
        let object = if name.is_empty() { String::new() } else { format!(" \"{name}\"") };
        let group_text = if group.is_empty() { "\"\"".to_owned() } else { format!("\"{group}\"") };
        let kind = if group.is_empty() { what.to_owned() } else { format!("{what}.{group}") };
        let mut failure = Self::new(
            403,
            format!(
                "{kind}{object} is forbidden: User \"{user}\" cannot {verb} resource \"{what}\" in API group {group_text}: {why}"
            ),
        );
        failure.details = Some(json!({"name": name, "group": group, "kind": what}));
        failure
    }

    /// A policy's refusal.
    pub(crate) fn denied(kind: &str, name: &str, policy: &str, why: &str) -> Self {
        let message = format!("ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: {why}");
        let mut failure = Self::new(422, format!("{kind} \"{name}\" is forbidden: {message}"));
        failure.details = Some(json!({"name": name, "causes": [{"message": message}]}));
        failure
    }

    pub(crate) fn not_found(plural: &str, group: &str, name: &str) -> Self {
        let kind = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        let mut failure = Self::new(404, format!("{kind} \"{name}\" not found"));
        failure.details = Some(json!({"name": name, "group": group, "kind": plural}));
        failure
    }

    pub(crate) fn exists(plural: &str, group: &str, name: &str) -> Self {
        let kind = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        let mut failure = Self::new(409, format!("{kind} \"{name}\" already exists"));
        failure.reason = "AlreadyExists";
        failure.details = Some(json!({"name": name, "group": group, "kind": plural}));
        failure
    }

    pub(crate) fn conflict(plural: &str, group: &str, name: &str, why: &str) -> Self {
        let mut failure =
            Self::new(409, format!("Operation cannot be fulfilled on {plural}.{group} \"{name}\": {why}"));
        failure.details = Some(json!({"name": name, "group": group, "kind": plural}));
        failure
    }

    pub(crate) fn invalid(kind: &str, group: &str, name: &str, causes: &[Cause]) -> Self {
        let texts: Vec<String> = causes.iter().map(|c| format!("{}: {}", c.field, c.message)).collect();
        let text = if texts.len() == 1 { texts[0].clone() } else { format!("[{}]", texts.join(", ")) };
        let mut failure = Self::new(422, format!("{kind}.{group} \"{name}\" is invalid: {text}"));
        let causes: Vec<Value> = causes.iter().map(Cause::body).collect();
        failure.details = Some(json!({"name": name, "group": group, "kind": kind, "causes": causes}));
        failure
    }

    pub(crate) fn gone(asked: u64, oldest: u64) -> Self {
        let mut failure = Self::new(410, format!("too old resource version: {asked} ({oldest})"));
        failure.reason = "Expired";
        failure
    }

    pub(crate) fn body(&self) -> Value {
        let mut body = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            body["reason"] = json!(self.reason);
        }
        let mut details = self.details.clone();
        if let Some(seconds) = self.retry_after {
            details.get_or_insert_with(|| json!({}))["retryAfterSeconds"] = json!(seconds);
        }
        if let Some(details) = details {
            body["details"] = details;
        }
        body
    }
}

fn reason_of(code: u16) -> &'static str {
    match code {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        406 => "NotAcceptable",
        405 => "MethodNotAllowed",
        409 => "Conflict",
        410 => "Expired",
        413 => "RequestEntityTooLarge",
        415 => "UnsupportedMediaType",
        422 => "Invalid",
        429 => "TooManyRequests",
        500 => "InternalError",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        _ => "Unknown",
    }
}
