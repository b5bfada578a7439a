"""One prompt, or a dataset of questions, over any number of documents, into a file of answers that resumes."""
