// What tests/clients/test_openai_npm.py runs: one use of the openai package of npm each, whose answer it prints as JSON.
const { OpenAI, BadRequestError } = require("openai");
const { readFileSync } = require("node:fs");

const { url, model, question, tool, schema, tooLong, name } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const create = (fields) =>
  client.chat.completions.create({ model, messages: question, max_tokens: 100, ...fields });

const uses = {
  async answer() {
    return (await create({})).choices[0].message.content;
  },
  async stream() {
    let text = "";
    for await (const chunk of await create({ stream: true })) text += chunk.choices[0]?.delta.content ?? "";
    return text;
  },
  async structured() {
    const format = { type: "json_schema", json_schema: { name: "payment", schema } };
    return JSON.parse((await create({ response_format: format })).choices[0].message.content);
  },
  async tool() {
    const runner = client.chat.completions.stream({ model, messages: question, tools: [tool], tool_choice: "required" });
    const message = await runner.finalMessage();
    return JSON.parse(message.tool_calls[0].function.arguments);
  },
  async error() {
    try {
      return await create({ messages: [{ role: "user", content: tooLong }] });
    } catch (error) {
      return error instanceof BadRequestError && [error.code, error.param];
    }
  },
};
uses[name]().then((value) => console.log(JSON.stringify(value)));
