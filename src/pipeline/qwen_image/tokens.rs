//! Tokens of a prompt inside a fixed text, tokenised in one piece: what is around it is no chat template.

use std::path::Path;

use viaduct_export::arch::qwen_image::parameters::Template;

use crate::{
    pipeline::prompt::{EncodedPrompt, PromptError, TextTokenizer},
    tensor::HostTensor,
};

/// A tokenizer and the text around a prompt.
pub struct TemplatedTokenizer {
    tokenizer: TextTokenizer,
    template: Template,
    system: Vec<u32>,
    /// Tokens after the prompt.
    after: usize,
    length: usize,
}

impl TemplatedTokenizer {
    /// Loads a bundle's `tokenizer/` directory. A text has at most `length` tokens.
    pub fn load(
        directory: &Path,
        template: Template,
        length: usize,
    ) -> Result<TemplatedTokenizer, PromptError> {
        let tokenizer = TextTokenizer::load(directory)?;
        let system = tokenizer.tokenize(&template.system)?;
        let after = tokenizer.tokenize(&template.after)?.len();
        let around = system.len() + tokenizer.tokenize(&template.before)?.len() + after;
        match around < length {
            true => Ok(TemplatedTokenizer { tokenizer, template, system, after, length }),
            false => Err(PromptError::NoRoom),
        }
    }

    /// Tokens of the template's system part, which the transformer does not read.
    pub fn system_tokens(&self) -> usize {
        self.system.len()
    }

    /// The whole text's tokens, without padding. Where they are too many, the prompt's last ones go, and the template stays
    /// whole. An empty prompt is one space, as in diffusers.
    pub fn encode(&self, prompt: &str) -> Result<EncodedPrompt, PromptError> {
        let Template { system, before, after } = &self.template;
        let prompt = if prompt.is_empty() { " " } else { prompt };
        let mut ids = self.tokenizer.tokenize(&[system, before, prompt, after].concat())?;
        if !ids.starts_with(&self.system) {
            return Err(PromptError::NotAPrefix);
        }
        let truncated = ids.len().saturating_sub(self.length);
        let end = ids.len().saturating_sub(self.after);
        ids.drain(end.saturating_sub(truncated)..end);
        let tokens = ids.len();
        Ok(EncodedPrompt {
            ids: HostTensor::i64(&[1, tokens], ids.into_iter().map(i64::from).collect()),
            mask: HostTensor::i64(&[1, tokens], vec![1; tokens]),
            tokens,
            truncated,
        })
    }
}
